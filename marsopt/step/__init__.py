"""The engine: a step over parts of tensors."""
