"""The class: the one step behind the interface of torch.optim."""
