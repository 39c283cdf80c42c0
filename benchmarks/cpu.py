"""How fast does the embedded default draw a long blank on a CPU? Against llama.cpp, same file, tokens and threads.

    python -m venv llama && llama/bin/pip install llama-cpp-python        # compiles llama.cpp: needs a C++ compiler
    python benchmarks/cpu.py TEXT --llama-python llama/bin/python --rounds 5

A query is a paragraph of TEXT: tokens before a blank, the blank and, with the future, tokens after it. llama.cpp reads
the tokens before it and draws as many. In each round every program runs once, in turn, and is compared with llama.cpp
in the same round: other work on the machine slows all down, and CPU time is disturbed less than time. "whole call" is
from the query to the sample; "decoding" is the time after the first drawn token. The first round is not counted.

Then the perplexity of blanks of other paragraphs, by the network in float32 and by its small copy, which in this
measurement also reads the text before the blank.

Without --llama-python only acgpt is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, paragraphs, report
from result_tables import cpu_accuracy_rows, cpu_rows

import acgpt
from acgpt.engine.attention import Dense
from acgpt.engine.layout import build
from acgpt.engine.score import target_log_probs
from acgpt.models.loading import DEFAULT_PACKAGE
from acgpt.models.router import Route

LLAMA = "llama.cpp"
Seconds = dict[str, float]  # to the first token and for the rest of them; likewise of CPU time
PARTS = {  # of the seconds of a call, whose sum is compared with that of llama.cpp
    "decoding": ("rest",),
    "decoding_cpu": ("cpu_rest",),
    "whole": ("first", "rest"),
    "whole_cpu": ("cpu_first", "cpu_rest"),
}
WORKER = Path(__file__).with_name("llama_worker.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="text file with long lines")
    parser.add_argument("--llama-python", help="Python interpreter of an environment with llama-cpp-python")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds that count")
    parser.add_argument("--before", type=int, default=130, help="tokens before the blank")
    parser.add_argument("--blank", type=int, default=64, help="tokens of the blank")
    parser.add_argument("--after", type=int, default=36, help="tokens after the blank, read with the future")
    parser.add_argument("--paragraphs", type=int, default=48, help="paragraphs to measure perplexity on")
    args = parser.parse_args()
    if not args.text.is_file():
        parser.error(f"{args.text} is not a file: name a text file with long lines.")

    models = {"float32": acgpt.load(device="cpu", dtype="float32"), "auto": acgpt.load(device="cpu")}
    tokenizer, length = models["auto"].tokenizer, args.before + args.blank + args.after
    texts = [tokenizer(text)["input_ids"][:length] for text in paragraphs([args.text], 10**6)]
    texts = [ids for ids in texts if len(ids) == length][: args.paragraphs + 1]
    if len(texts) < 2:
        parser.error(f"{args.text} has fewer than two lines of {length} tokens: name a text file with longer lines.")
    results = {str(threads): speed(models, texts[0], threads, args) for threads in args.threads}
    accuracy = {
        "past only": deviation(models["auto"], texts[1:], args, future=False),
        "with the future": deviation(models["auto"], texts[1:], args, future=True),
    }
    record = {
        "benchmark": "cpu", **machine("cpu"), "hardware": f"{cpu_name()}, {os.cpu_count()} cores",
        "load": [round(value, 1) for value in os.getloadavg()], "decoding_weights": models["auto"].decoding_weights,
        **{name: vars(args)[name] for name in ("rounds", "before", "blank", "after")}, "paragraphs": len(texts) - 1,
        "results": results, "accuracy": accuracy,
    }  # fmt: skip
    title = f"a blank of {args.blank} tokens after {args.before}, median of {args.rounds} rounds"
    report(title, *cpu_rows(results), record, cpu_accuracy_rows(accuracy))


def cpu_name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def query(ids: list[int], args: argparse.Namespace, blank: int, after: int) -> acgpt.Query:
    """Return a query with a blank: its tokens are asked, those around it are given."""
    start = args.before
    end = start + args.blank
    tokens = [*ids[:start], *ids[start : start + blank], *ids[end : end + after]]
    return acgpt.Query(tokens=tokens, given=[not start <= i < start + blank for i in range(len(tokens))])


# ---- speed -----------------------------------------------------------------------------------------------------------


def speed(
    models: dict[str, acgpt.LanguageModel], ids: list[int], threads: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Return tokens per second of each program, and their ratios to llama.cpp, as medians over rounds."""
    torch.set_num_threads(threads)
    programs: dict[str, Callable[[], Seconds]] = {}
    for future in (False, True):
        for name, lm in models.items():
            label = f"acgpt, {name}, {'with the future' if future else 'past only'}"
            programs[label] = sampler(lm, ids, args, future)
    worker = None
    if args.llama_python:
        worker = llama_cpp(args.llama_python, threads)
        programs = {LLAMA: asker(worker, [models["auto"].bos, *ids[: args.before]], args.blank), **programs}
    rounds = [{name: run() for name, run in programs.items()} for _ in range(args.rounds + 1)][1:]
    if worker is not None:
        worker.communicate()
    results = {}
    for name in programs:
        results[name] = {
            "whole": statistics.median(args.blank / (one[name]["first"] + one[name]["rest"]) for one in rounds),
            "decoding": statistics.median((args.blank - 1) / one[name]["rest"] for one in rounds),
        }
        if worker is not None:
            for label, parts in PARTS.items():
                pairs = [[sum(one[program][part] for part in parts) for program in (LLAMA, name)] for one in rounds]
                results[name][f"{label}_ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return results


def sampler(lm: acgpt.LanguageModel, ids: list[int], args: argparse.Namespace, future: bool) -> Callable[[], Seconds]:
    """Return a function that draws the blank and returns the seconds that it took."""
    after = args.after if future else 0
    whole, short = (query(ids, args, blank, after) for blank in (args.blank, 1))

    def seconds(question: acgpt.Query) -> np.ndarray:
        start = np.array([time.perf_counter(), time.process_time()])
        lm.sample(question, seed=0, future=future)
        return np.array([time.perf_counter(), time.process_time()]) - start

    def run() -> Seconds:
        first, cpu_first = seconds(short)
        total, cpu_total = seconds(whole)
        return {"first": first, "rest": total - first, "cpu_first": cpu_first, "cpu_rest": cpu_total - cpu_first}

    return run


def llama_cpp(python: str, threads: int) -> subprocess.Popen[str]:
    """Start llama.cpp on the embedded model's file."""
    package = importlib.util.find_spec(DEFAULT_PACKAGE)
    assert package is not None and package.submodule_search_locations
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    command = [python, str(WORKER), str(file), str(threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asker(worker: subprocess.Popen[str], ids: list[int], tokens: int) -> Callable[[], Seconds]:
    """Return a function that lets llama.cpp draw tokens and returns the seconds that it took."""

    def run() -> Seconds:
        assert worker.stdin is not None and worker.stdout is not None
        print(json.dumps({"ids": ids, "tokens": tokens}), file=worker.stdin, flush=True)
        if not (line := worker.stdout.readline()):
            raise SystemExit("llama.cpp did not start: is llama-cpp-python installed for --llama-python?")
        seconds: Seconds = json.loads(line)
        return seconds

    return run


# ---- accuracy --------------------------------------------------------------------------------------------------------


def deviation(
    lm: acgpt.LanguageModel, texts: list[list[int]], args: argparse.Namespace, *, future: bool
) -> dict[str, float]:
    """Return the perplexity of blanks by the network and by its small copy, and by how much tokens differ."""
    questions = [query(ids, args, args.blank, args.after if future else 0) for ids in texts]
    dense = np.array([[token.log_prob for token in score.tokens] for score in lm.log_prob(questions, future=future)])
    route: Route = lm._router.routes(questions[:1], future, None)[0]
    with lm._executor.inference(route) as engine:
        assert engine.cpu_steps is not None
        if (step := engine.cpu_steps.current()) is None:
            raise SystemExit("on this CPU, acgpt decodes in float32: there is no small copy to measure.")
        small = np.array([small_log_probs(engine, step, question, future) for question in questions])
    change = np.exp(dense.mean() - small.mean()) - 1
    return {
        "tokens": dense.size,
        "perplexity": float(np.exp(-dense.mean())),
        "perplexity_small": float(np.exp(-small.mean())),
        "change": float(change),
        "rms": float(np.sqrt(np.square(small - dense).mean())),
        "median": float(np.median(np.abs(small - dense))),
        "largest": float(np.abs(small - dense).max()),
    }


def small_log_probs(engine: Any, step: Any, question: acgpt.Query, future: bool) -> np.ndarray:
    """Return the log-probabilities of the asked tokens by a small copy of the network, in one pass."""
    layout = build([question], bos=engine.bos, mask=engine.mask, future=future)
    first = int(layout.rows.min())
    cache = step.cache(torch.arange(len(layout.ids))[None])
    logits = step(*layout.inputs(), Dense(layout), len(layout.ids) - first, cache)[0]
    scores: np.ndarray = target_log_probs(logits[layout.rows - first], layout.targets).numpy()
    return scores


if __name__ == "__main__":
    main()
