"""Time llama.cpp for benchmarks/cpu.py: read requests from stdin, a JSON line each, and write the seconds.

It runs in an environment of its own, with llama-cpp-python and without torch.
"""

from __future__ import annotations

import json
import sys
import time

from llama_cpp import Llama

path, threads = sys.argv[1], int(sys.argv[2])
model = Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)


def draw(ids: list[int]) -> int:
    """Read tokens and draw the next one from the model's own distribution."""
    model.eval(ids)
    return model.sample(temp=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)


def now() -> tuple[float, float]:
    """Return the time and the CPU time."""
    return time.perf_counter(), time.process_time()


for line in sys.stdin:
    request = json.loads(line)
    model.reset()
    start = now()
    token = draw(request["ids"])
    first = now()
    for _ in range(request["tokens"] - 1):
        token = draw([token])
    end = now()
    print(
        json.dumps([[b - a for a, b in zip(*pair, strict=True)] for pair in ((start, first), (first, end))]), flush=True
    )
