"""Devices and dtypes by name; the meaning of "auto"."""

from __future__ import annotations

import torch

from acgpt.errors import InputError


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
