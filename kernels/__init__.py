"""Triton kernels, each with the PyTorch code that defines it. They import nothing of the model or the communicators."""
