"""Pure functions: the one step over stacks, and rules over trees of tensors."""
