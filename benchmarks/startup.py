"""How long does a command take until its answer? Time and CPU time of fresh processes, against importing the libraries.

    python benchmarks/startup.py --rounds 5

The floor is a process that only imports torch, transformers and the classes of the embedded model. In each round every
command runs once, after the floor, and is compared with the floor of the same round: other work on the machine slows
both down. The first round, which fills caches, is not counted. `acgpt score` answers with the embedded model.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

from common import machine, report
from result_tables import startup_rows

FLOOR = "import torch, transformers; from transformers import AutoModelForCausalLM, LlamaForCausalLM"
COMMANDS = {
    "score": ["score", "The capital of {{Italy}} is Rome."],
    "score --json": ["score", "The capital of {{Italy}} is Rome.", "--json"],
    "methods": ["methods"],
    "--help": ["--help"],
    "score --help": ["score", "--help"],
    "a template error": ["score", "The {{cat"],
    "a missing model": ["score", "The {{cat}}", "--model", "/nowhere/model"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds that count")
    args = parser.parse_args()
    programs = {"floor": ["-c", FLOOR]} | {name: ["-m", "acgpt", *words] for name, words in COMMANDS.items()}
    rounds = [{name: run(words) for name, words in programs.items()} for _ in range(args.rounds + 1)][1:]
    results = {}
    for name in programs:
        seconds, cpu = (statistics.median(one[name][i] for one in rounds) for i in (0, 1))
        results[name] = {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(cpu, 2),
            "beyond_floor": round(statistics.median(one[name][0] - one["floor"][0] for one in rounds), 2),
            "beyond_floor_cpu": round(statistics.median(one[name][1] - one["floor"][1] for one in rounds), 2),
            "ratio_seconds": round(statistics.median(one[name][0] / one["floor"][0] for one in rounds), 3),
            "ratio_cpu": round(statistics.median(one[name][1] / one["floor"][1] for one in rounds), 3),
        }
    load = [round(value, 1) for value in os.getloadavg()]
    record = {
        "benchmark": "startup", "rounds": args.rounds, **machine("cpu"), "cores": os.cpu_count(), "load": load,
        "floor": FLOOR, "results": results,
    }  # fmt: skip
    report(f"median of {args.rounds} rounds, fresh processes, load {load[0]}", *startup_rows(results), record)


def run(words: list[str]) -> tuple[float, float]:
    """Run Python with these arguments; return the seconds and the CPU seconds that it took."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
