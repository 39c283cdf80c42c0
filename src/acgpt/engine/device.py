"""Devices and dtypes by name, and what "auto" means."""

from __future__ import annotations

import torch

from acgpt.errors import InputError


def choose_device(device: str) -> torch.device:
    """The device by name; "auto" is CUDA, else MPS, else the CPU."""
    if device == "auto":
        best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(best)
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device {device!r} is not one: use auto, cpu, cuda, cuda:1 or mps.") from error
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not there.get(place.type, False):
        raise InputError(f"device {device!r} is not available here; use auto or cpu.")
    return place


def choose_dtype(dtype: str | torch.dtype, device: torch.device, quantised: bool) -> torch.dtype | str:
    """The dtype by name; "auto" is float32 (bf16 is slower on a CPU), on CUDA the checkpoint's own."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type != "cuda" else torch.bfloat16 if quantised else "auto"
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if dtype not in named:
        raise InputError(f"dtype {dtype!r} is not one of auto, {', '.join(named)}.")
    return named[dtype]
