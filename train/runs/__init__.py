"""Run folders: settings, checkpoints, and what is made of them."""
