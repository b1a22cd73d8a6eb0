"""Other libraries: torch.optim and torchtitan."""
