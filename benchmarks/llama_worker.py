"""Time llama.cpp for benchmarks/cpu.py: read requests from stdin, a JSON line each, and write the seconds.

It runs in an environment of its own, with llama-cpp-python and without torch.
"""

from __future__ import annotations

import json
import sys
import time

from llama_cpp import Llama


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    model = Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
    for line in sys.stdin:
        request = json.loads(line)
        model.reset()
        start, cpu_start = time.perf_counter(), time.process_time()
        model.eval(request["ids"])
        token = draw(model)
        first, cpu_first = time.perf_counter(), time.process_time()
        for _ in range(request["tokens"] - 1):
            model.eval([token])
            token = draw(model)
        end, cpu_end = time.perf_counter(), time.process_time()
        seconds = {"first": first - start, "rest": end - first}
        print(json.dumps({**seconds, "cpu_first": cpu_first - cpu_start, "cpu_rest": cpu_end - cpu_first}), flush=True)


def draw(model: Llama) -> int:
    """Draw a token from the model's own distribution."""
    return model.sample(temp=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)


if __name__ == "__main__":
    main()
