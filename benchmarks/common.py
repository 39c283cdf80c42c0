"""Shared by the benchmark programs: models, adapters to compare, intervals, a clock, a table, the final JSON line."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import acgpt
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import RESAMPLES, SEED, percentiles, resampled_means

BOOTSTRAP = {"resamples": RESAMPLES, "seed": SEED}  # of intervals, for the record
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


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def by_label(values: Sequence[str], what: str) -> dict[str, str]:
    """Return the values of an option by label: `LABEL=VALUE`, or a value that is its own label.

    Raises:
        InputError: Two values have the same label. `what` names the option.
    """
    result: dict[str, str] = {}
    for text in values:
        label, separator, value = text.partition("=")
        if not separator or Path(text).exists():
            label = value = text
        if label in result:
            raise InputError(f"{what} has two values with the label {label!r}: write LABEL=VALUE.")
        result[label] = value
    return result


def load_adapted(model: str | None, adapter: str | None, device: str, dtype: str = "auto") -> acgpt.LanguageModel:
    """Load a model with an adapter, so that adapters can be compared: each is asked as the embedded one is.

    That is, if it reads the future, it answers the queries that need the future, and the model without it the others.

    Args:
        model: As in `acgpt.load`.
        adapter: As in `acgpt.load`, or "none".
        device: As in `acgpt.load`.
        dtype: As in `acgpt.load`.
    """
    disable_progress_bar()
    choice: str | Literal[False] | None = False if adapter == "none" else adapter
    lm = acgpt.load(model, choice, device, dtype)
    lm.router = lm.router or lm.reads_future
    return lm


def check_limit(limit: int | None) -> None:
    """Check the value of `--limit`."""
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit} leaves nothing to measure: use a number from 1 on.")


def resampled(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the means of columns on resamples of their rows, the same ones for all columns."""
    return resampled_means({name: (values, np.ones(len(values))) for name, values in columns.items()}, SEED)


def mean_with_interval(mean: float, means: np.ndarray, rows: int) -> dict[str, Any]:
    """Return a mean, or a difference of means, and its 95 % interval from its values on resamples of so many rows."""
    interval = percentiles(means, rows)
    return {"mean": float(mean), "interval": None if interval is None else list(interval)}


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
    program = f"benchmarks/{Path(sys.argv[0]).name}"  # wherever it was started
    print(json.dumps({"command": shlex.join(["python", program, *sys.argv[1:]]), **record}))
