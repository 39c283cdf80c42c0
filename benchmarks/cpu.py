"""CPU decoding: how fast the embedded default draws a long blank, against llama.cpp, same file, tokens and threads.

    python -m venv llama && llama/bin/pip install llama-cpp-python        # compiles llama.cpp: needs a C++ compiler
    python benchmarks/cpu.py TEXT --llama-python llama/bin/python --rounds 5
    python benchmarks/cpu.py TEXT                                         # only acgpt

A query is a paragraph of TEXT: tokens before a blank, the blank and, with the future, tokens after it. llama.cpp reads
the tokens before it and draws as many. In each round every program runs once, in turn, and is compared with llama.cpp
in the same round: other work on the machine slows all down, and CPU time is disturbed less than time.
"tokens_per_second" is from the query to the sample, "decoding" after the first drawn token. The first round is not
counted.

    python benchmarks/cpu.py --beside --spin 300000 500                  # processes beside each other

With `--beside`, fills and training steps are timed alone and two processes at once, in turns, and a server under 8
clients alone and beside a training run. A value of `--spin` replaces the GOMP_SPINCOUNT that acgpt sets; 300000 is what
the runtime does by itself. A time is that of the slower process.

The notes have the perplexity of blanks of other paragraphs, by the network in float32 and by its small copy ("auto"
draws from it), which in this measurement also reads the text before the blank.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Parser, print_record
from serving import closed, server

import acgpt
from acgpt.engine.attention import Dense
from acgpt.engine.layout import build
from acgpt.engine.score import target_log_probs
from acgpt.models.loading import DEFAULT_PACKAGE

THREADS = (1, 2)
BEFORE, BLANK, AFTER = 130, 64, 36  # tokens of a query; those after the blank are read with the future
PARAGRAPHS = 48  # to measure perplexity on
LLAMA = "llama.cpp"
WORKER = Path(__file__).with_name("llama_worker.py")
FILL, TRAIN = "3 fills", "10 training steps"
WORKS = {  # acgpt is imported first, as its commands do: it then sets how long threads spin
    FILL: """
import acgpt
lm = acgpt.load(device="cpu")
texts = ["The capital of {{_}} is Paris.", "She went to the {{_}} to borrow some books.", "It was {{_}}, so he slept."]
work = lambda: [lm.fill(text, n=1, max_tokens=8) for text in texts]
""",
    TRAIN: """
import acgpt, torch
from acgpt.training.learner import new_model
from acgpt.training.recipe import SHAPES
network, ids = new_model(SHAPES["tiny"], vocabulary=4096, positions=128), torch.arange(2048).reshape(16, 128)
optimizer = torch.optim.AdamW(network.parameters())
def work():
    for _ in range(10):
        network(input_ids=ids, labels=ids).loss.backward()
        optimizer.step(), optimizer.zero_grad()
""",
}
LOOP = """
import sys, time
work()
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    work()
    print(time.perf_counter() - start, flush=True)
"""
CLIENTS, REQUESTS = 8, 64
Seconds = tuple[np.ndarray, np.ndarray]  # to the first token, and for the rest of them; each of time and CPU time


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("text", type=Path, nargs="?", help="text file with long lines")
    parser.add_argument("--llama-python", help="Python interpreter of an environment with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds that count")
    parser.add_argument("--beside", action="store_true", help="measure processes beside each other instead")
    parser.add_argument("--spin", nargs="+", default=["500"], help="values of GOMP_SPINCOUNT, for --beside")
    args = parser.parse_args()
    if args.beside:
        rows = [row for work in WORKS for row in two_at_once(work, args.spin, args.rounds)] + asyncio.run(serving())
        print_record("cpu", "processes beside each other", rows, rounds=args.rounds, load=os.getloadavg())
        return
    if args.text is None or not args.text.is_file():
        parser.error(f"{args.text} is not a file: name a text file with long lines.")
    models = {"float32": acgpt.load(device="cpu", dtype="float32"), "auto": acgpt.load(device="cpu")}
    tokenizer, length = models["auto"].tokenizer, BEFORE + BLANK + AFTER
    texts = [tokenizer(line.strip())["input_ids"][:length] for line in args.text.read_text("utf-8").splitlines()]
    texts = [ids for ids in texts if len(ids) == length][: PARAGRAPHS + 1]
    if len(texts) < 2:
        parser.error(f"{args.text} has fewer than two lines of {length} tokens: name a text file with longer lines.")
    rows = [row for threads in THREADS for row in speed(models, texts[0], threads, args.llama_python, args.rounds)]
    accuracy = {
        "past only": deviation(models["auto"], texts[1:], future=False),
        "with the future": deviation(models["auto"], texts[1:], future=True),
    }
    case = f"a blank of {BLANK} tokens after {BEFORE}"
    print_record("cpu", case, rows, rounds=args.rounds, load=os.getloadavg(), accuracy=accuracy)


def query(ids: list[int], blank: int, after: int) -> acgpt.Query:
    """Return a query with a blank: its tokens are asked, those around it are given."""
    tokens = [*ids[: BEFORE + blank], *ids[BEFORE + BLANK :][:after]]
    return acgpt.Query(tokens=tokens, given=[not BEFORE <= i < BEFORE + blank for i in range(len(tokens))])


# ---- speed -----------------------------------------------------------------------------------------------------------


def speed(
    models: dict[str, acgpt.LanguageModel], ids: list[int], threads: int, llama_python: str | None, rounds: int
) -> list[dict[str, Any]]:
    """Return tokens per second of each program, and their ratios to llama.cpp, as medians over rounds."""
    torch.set_num_threads(threads)
    programs: dict[str, Callable[[], Seconds]] = {}
    worker = None
    if llama_python:
        worker = start_llama_cpp(llama_python, threads)
        programs[LLAMA] = asker(worker, [models["auto"].bos, *ids[:BEFORE]])
    for future in (False, True):
        for name, lm in models.items():
            programs[f"acgpt, {name}, {'with the future' if future else 'past only'}"] = sampler(lm, ids, future)
    seconds = [{name: run() for name, run in programs.items()} for _ in range(rounds + 1)][1:]
    if worker is not None:
        worker.communicate()
    rows = []
    for name in programs:
        rest = np.array([one[name][1] for one in seconds])  # (rounds, 2)
        total = rest + np.array([one[name][0] for one in seconds])
        row = {
            "row": f"{name}, {threads} thread{'s' if threads > 1 else ''}",
            "decoding_tokens_per_second": statistics.median((BLANK - 1) / rest[:, 0]),
            "tokens_per_second": statistics.median(BLANK / total[:, 0]),
        }
        if worker is not None:
            rest_ratios = np.array([one[LLAMA][1] for one in seconds]) / rest
            total_ratios = np.array([sum(one[LLAMA]) for one in seconds]) / total
            for key, ratios in (("decoding_ratio", rest_ratios), ("ratio", total_ratios)):
                row[f"{key}_llama_cpp"], row[f"{key}_llama_cpp_cpu_time"] = np.median(ratios, 0).tolist()
        rows.append(row)
    return rows


def sampler(lm: acgpt.LanguageModel, ids: list[int], future: bool) -> Callable[[], Seconds]:
    """Return a function that draws the blank and returns the seconds that it took."""
    whole, short = (query(ids, blank, AFTER if future else 0) for blank in (BLANK, 1))

    def seconds(question: acgpt.Query) -> np.ndarray:
        start = np.array([time.perf_counter(), time.process_time()])
        lm.sample(question, seed=0, future=future)
        return np.array([time.perf_counter(), time.process_time()]) - start

    def run() -> Seconds:
        first = seconds(short)
        return first, seconds(whole) - first

    return run


def start_llama_cpp(python: str, threads: int) -> subprocess.Popen[str]:
    """Start llama.cpp on the embedded model's file."""
    package = importlib.util.find_spec(DEFAULT_PACKAGE)
    assert package is not None and package.submodule_search_locations
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    command = [python, str(WORKER), str(file), str(threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asker(worker: subprocess.Popen[str], ids: list[int]) -> Callable[[], Seconds]:
    """Return a function that lets llama.cpp draw as many tokens and returns the seconds that it took."""

    def run() -> Seconds:
        assert worker.stdin is not None and worker.stdout is not None
        print(json.dumps({"ids": ids, "tokens": BLANK}), file=worker.stdin, flush=True)
        if not (line := worker.stdout.readline()):
            raise SystemExit("llama.cpp did not start: is llama-cpp-python installed for --llama-python?")
        first, rest = json.loads(line)
        return np.array(first), np.array(rest)

    return run


# ---- processes beside each other -------------------------------------------------------------------------------------


@contextmanager
def started(work: str, spin: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a process that does some work for each line that it reads, and prints the seconds."""
    env = os.environ | ({} if spin is None else {"GOMP_SPINCOUNT": spin})
    command = [sys.executable, "-c", WORKS[work] + LOOP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise SystemExit(f"the process for {work} has ended.")
            yield process
        finally:
            process.kill()


def slowest(processes: list[subprocess.Popen[str]]) -> float:
    """Let processes work at once; return the seconds of the slowest."""
    for process in processes:
        print(file=process.stdin, flush=True)
    return max(float(process.stdout.readline()) for process in processes)  # type: ignore[union-attr]


def two_at_once(work: str, spins: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return the median seconds of some work alone and two processes at once, with each of the values in turn."""
    with ExitStack() as stack:
        pairs = {spin: [stack.enter_context(started(work, spin)) for _ in range(2)] for spin in spins}
        cases = {(spin, count): pair[:count] for spin, pair in pairs.items() for count in (1, 2)}
        times = [{case: slowest(processes) for case, processes in cases.items()} for _ in range(rounds)]
    return [
        {
            "row": f"{work}, {'alone' if count == 1 else 'two at once'}, spin {spin}",
            "seconds": statistics.median(one[spin, count] for one in times),
            "relative_time": statistics.median(one[spin, count] / one[spin, 1] for one in times),
        }
        for spin, count in cases
    ]


async def serving() -> list[dict[str, Any]]:
    """Return how fast a server under some clients answers, alone and beside a training run, and how fast that is."""
    with server("cpu") as ask, started(TRAIN) as training:
        await closed(ask, CLIENTS, CLIENTS, 10**6, math.inf)  # for code and caches
        alone, step = (await closed(ask, CLIENTS, REQUESTS, 0, math.inf)).row(), slowest([training])
        load = asyncio.ensure_future(closed(ask, CLIENTS, REQUESTS, 0, math.inf))
        steps = []
        while not load.done():
            steps.append(await asyncio.to_thread(slowest, [training]))
        beside = load.result().row()
    ratio = alone["requests_per_second"] / beside["requests_per_second"]
    slower = statistics.median(steps)
    return [
        {**alone, "row": f"a server under {CLIENTS} clients, alone", "relative_time": 1.0},
        {**beside, "row": f"a server under {CLIENTS} clients, beside training", "relative_time": ratio},
        {"row": f"{TRAIN}, beside the server", "seconds": slower, "relative_time": slower / step},
    ]


# ---- accuracy --------------------------------------------------------------------------------------------------------


def deviation(lm: acgpt.LanguageModel, texts: list[list[int]], *, future: bool) -> dict[str, float]:
    """Return the perplexity of blanks by the network and by its small copy, and by how much tokens differ."""
    questions = [query(ids, BLANK, AFTER if future else 0) for ids in texts]
    dense = np.array([[token.log_prob for token in score.tokens] for score in lm.log_prob(questions, future=future)])
    with lm._executor.inference(lm._router.routes(questions[:1], future, None)[0]) as engine:
        step = engine.cpu_steps and engine.cpu_steps.current()
        if step is None:
            raise SystemExit("on this CPU, acgpt decodes in float32: there is no small copy to measure.")
        small = np.array([small_log_probs(engine, step, question, future) for question in questions])
    return {
        "tokens": dense.size,
        "perplexity": float(np.exp(-dense.mean())),
        "perplexity_small": float(np.exp(-small.mean())),
        "median_difference": float(np.median(np.abs(small - dense))),
        "largest_difference": float(np.abs(small - dense).max()),
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
