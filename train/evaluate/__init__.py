"""python -m train.evaluate: a trained model on tasks, and its held-out loss."""
