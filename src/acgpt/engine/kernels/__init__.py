"""Triton kernels: training's attention and loss, and one step of decoding."""
