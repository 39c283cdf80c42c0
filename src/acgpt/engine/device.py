"""Devices and dtypes by name; the meaning of "auto". The precision of a GPU's products, and capturing its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

from acgpt.errors import InputError

Result = TypeVar("Result")


def choose_device(device: str) -> torch.device:
    """Return the device of this name; "auto" is CUDA, else MPS, else the CPU."""
    if device == "auto":
        best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(best)
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{device!r} is not a device: use auto, cpu, cuda, cuda:1 or mps.") from error
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not available.get(chosen.type, False):
        raise InputError(f"device {device!r} is not available here; use auto or cpu.")
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device, quantised: bool) -> torch.dtype | str:
    """Return the dtype of this name; "auto" is the checkpoint's dtype on CUDA, else float32 (bf16 is slow on a CPU)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type != "cuda" else torch.bfloat16 if quantised else "auto"
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if dtype not in named:
        raise InputError(f"dtype {dtype!r} is not one of auto, {', '.join(named)}.")
    return named[dtype]


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which the work of a GPU is captured; torch's own belongs to the GPU of the first capture."""
    return torch.cuda.Stream(device)


def capture(work: Callable[[], Result], device: torch.device, pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture the kernels that a function launches on a GPU, which must be the current one.

    Other threads may use CUDA meanwhile. If it fails, the current stream is what it was before.

    Args:
        work: The function.
        device: The GPU.
        pool: Memory of an earlier graph that is never replayed at the same time; `None` for memory of its own.

    Returns:
        The graph, and what the function returned: tensors that a replay writes.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool, stream=capture_stream(device), capture_error_mode="thread_local"):
            result = work()
    except BaseException:
        torch.cuda.set_stream(stream)  # torch leaves its own behind if the capture cannot be ended
        raise
    return graph, result


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """Set the precision of fp32 matrix products on a GPU: "highest" is fp32, "high" is TF32, several times as fast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
