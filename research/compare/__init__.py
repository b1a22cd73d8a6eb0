"""python -m train.compare: optimizers against each other, each at its best rate."""
