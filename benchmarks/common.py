"""Shared by the benchmark programs: options, models, a clock, intervals, and the table and record that each prints."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from render import cell
from transformers import PreTrainedModel

from acgpt.common.provenance import versions
from acgpt.display.table import markdown_table
from acgpt.evaluation.bootstrap import SEED, percentiles, resampled_means
from acgpt.training.learner import new_model
from acgpt.training.recipe import SHAPES

SIZES = {"tiny": "tiny", "82M": "small", "124M": "base", "204M": "medium"}  # the paper's names, and those of recipes
VOCABULARY, BOS = 50257, 50256  # GPT-2's


class Parser(argparse.ArgumentParser):
    """A parser with the docstring of a program, whose errors are one line."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_device(self) -> None:
        """Add the option `--device`."""
        self.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def dtype_on(device: str) -> torch.dtype:
    """Return the dtype of networks on a device."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def build_model(size: str, device: str) -> PreTrainedModel:
    """Build the paper's network with random weights, on which speed does not depend."""
    model = new_model(SHAPES[SIZES[size]], vocabulary=VOCABULARY, positions=2048, bos=BOS)
    return model.to(device, dtype_on(device)).eval()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the median seconds of a call, after a first call that does not count."""
    work()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bandwidth(device: str) -> float:
    """Return bytes per second of a large device-to-device copy, read and written: the limit of memory-bound work."""
    size = 2**32 if device == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / clock(lambda: target.copy_(source), repeats=5)


def mean_with_interval(name: str, values: np.ndarray) -> dict[str, Any]:
    """Return the mean of values and its 95 % interval (for few values none), as entries of a row."""
    means = resampled_means({name: (values, np.ones(len(values)))}, SEED)[name]
    interval = percentiles(means, len(values))
    return {name: values.mean(), **({f"{name}_interval": interval} if interval else {})}


def print_record(
    benchmark: str, case: str, rows: Sequence[Mapping[str, Any]], device: str = "cpu", **notes: object
) -> None:
    """Print rows as a table for people, then as one line of JSON in the form of results.jsonl.

    Args:
        benchmark: The name of the benchmark.
        case: What was measured; render.py finds a record by both names.
        rows: By key: "row" is the label, KEY_interval the interval of KEY, and None stands for nothing.
        device: Where it was measured.
        **notes: What else the record says.
    """
    rows = [round_numbers(row) for row in rows]
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if not key.endswith("_interval")][1:]
    cells = [[row["row"], *(cell(row, f"{key}:,.6g") for key in keys)] for row in rows]
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()}, {os.cpu_count()} cores"
    print(f"{benchmark}: {case}, {hardware}\n")
    print(markdown_table(["", *keys], cells, [False, *[True] * len(keys)]) + "\n")
    record = {
        "benchmark": benchmark,
        "case": case,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "hardware": hardware,
        "versions": {name: versions()[name] for name in ("acgpt", "torch", "transformers", "python")},
        "date": datetime.date.today().isoformat(),
        "rows": rows,
        **({"notes": round_numbers(notes)} if notes else {}),
    }
    print(json.dumps(record, ensure_ascii=False))


def round_numbers(value: Any) -> Any:
    """Round all floats in a value of JSON to six significant digits."""
    if isinstance(value, Mapping):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
