"""python -m research.compare: optimizers against each other, each at its best rate."""
