"""Start-up: time until a command answers, and its CPU time, in fresh processes, against importing the libraries.

    python benchmarks/startup.py --rounds 5

The floor is a process that only imports torch, transformers and the classes of the embedded model. Then acgpt's own
imports are added, and loading that model. In each round every program runs once, after the floor, and is compared with
the floor of the same round: other work on the machine slows both down, and CPU time is disturbed less. The first round,
which fills caches, is not counted. `acgpt score` answers with the embedded model. PYTHONDONTWRITEBYTECODE must not be
set: without bytecode every start compiles acgpt.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time

from common import Parser, print_record

FLOOR = "import torch, transformers; from transformers import AutoModelForCausalLM, LlamaForCausalLM"
PARTS = {
    "imports": f"{FLOOR}; import acgpt.cli.main, acgpt.models.loading, acgpt.display.show",
    "imports, load": f"{FLOOR}; import acgpt.cli.main, acgpt.models.loading, acgpt.display.show; acgpt.load()",
}
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
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds that count")
    args = parser.parse_args()
    programs = {name: ["-c", code] for name, code in {"floor": FLOOR, **PARTS}.items()}
    programs |= {name: ["-m", "acgpt", *words] for name, words in COMMANDS.items()}
    rounds = [{name: run(words) for name, words in programs.items()} for _ in range(args.rounds + 1)][1:]
    rows = [
        {
            "row": name,
            "seconds": statistics.median(one[name][0] for one in rounds),
            "cpu_seconds": statistics.median(one[name][1] for one in rounds),
            "cpu_beyond_floor_seconds": statistics.median(one[name][1] - one["floor"][1] for one in rounds),
            "beyond_floor_seconds": statistics.median(one[name][0] - one["floor"][0] for one in rounds),
            "relative_time": statistics.median(one[name][0] / one["floor"][0] for one in rounds),
        }
        for name in programs
    ]
    print_record("startup", f"{os.cpu_count()} CPU cores", rows, floor=FLOOR, rounds=args.rounds, load=os.getloadavg())


def run(words: list[str]) -> tuple[float, float]:
    """Run Python with these arguments; return the seconds and the CPU seconds that it took."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
