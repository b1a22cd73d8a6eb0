"""GPT-2 in plain PyTorch, what it does when trained, and as Hugging Face keeps it."""

from train.gpt2.model import GPT2, Shape, tensor_sizes

__all__ = ["GPT2", "Shape", "tensor_sizes"]
