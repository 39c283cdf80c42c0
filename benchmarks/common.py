"""Shared by the benchmark programs: models of the paper's sizes, a clock, a table, and the final JSON line."""

from __future__ import annotations

import datetime
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

import acgpt

SIZES = {"tiny": (2, 128, 4), "82M": (6, 768, 12), "124M": (12, 768, 12), "204M": (12, 1024, 16)}
VOCABULARY = 50257


def build_model(size: str, device: str, dtype: torch.dtype, positions: int = 2048) -> PreTrainedModel:
    """Build GPT-2 with rotary positions, as in the paper, with random weights, on which speed does not depend."""
    layers, width, heads = SIZES[size]
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=positions,
        rotary_pct=1.0,
        use_parallel_residual=False,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        bos_token_id=50256,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(config).to(device, dtype).eval()


def clock(work: Callable[[], object], *, repeats: int = 3, warm_up: int = 1) -> float:
    """Return the median seconds of a call, after warming up."""
    times = []
    for repeat in range(warm_up + repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if repeat >= warm_up:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bandwidth(device: str) -> float:
    """Return bytes per second of a large device-to-device copy, read and written: the limit of memory-bound work."""
    size = 2**32 if device == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / clock(lambda: target.copy_(source), repeats=5)


def paragraphs(files: list[Path], most: int) -> list[str]:
    """Return lines of over 300 characters, from the beginning of these files."""
    lines = [line.strip() for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if len(line) > 300][:most]


def perplexity(scores: list[acgpt.Score]) -> float:
    """Return the perplexity per asked token, over all texts."""
    return math.exp(-sum(score.log_prob for score in scores) / sum(len(score.tokens) for score in scores))


def machine(device: str) -> dict[str, str]:
    """Return hardware, versions and date, for the record."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {
        "hardware": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def report(
    title: str,
    columns: list[str],
    rows: list[list[str]],
    record: dict[str, Any],
    more: tuple[list[str], list[list[str]]] | None = None,
) -> None:
    """Print one or two tables for people, then one JSON line: `… | tail -n 1 > benchmarks/results/NAME.json`."""
    for name, headings, cells in ((title, columns, rows), *([("", *more)] if more else [])):
        table = Table(title=name or None)
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="left" if i == 0 else "right")
        for row in cells:
            table.add_row(*row)
        Console(width=150).print(table)
    print(json.dumps({"command": shlex.join(["python", *sys.argv]), **record}))
