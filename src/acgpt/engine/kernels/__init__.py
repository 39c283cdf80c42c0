"""Triton kernels: attention and loss of training, and attention of a decoding step."""
