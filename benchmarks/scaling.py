"""How cost grows with the length of texts, the share of given tokens and the number of texts.

    python benchmarks/scaling.py --device cuda --size 124M
    python benchmarks/scaling.py --device cpu --size 82M --lengths 64 128 256 512 --length 256 --batches 1 2 4 --batch 1

From one case (--length, --share, --batch) each of the three numbers is varied by itself. Given tokens come in blocks of
32 at random positions; all others are asked. "score" is their log-probabilities, in as many passes as memory asks for;
"sample" draws all of them with a cache.

"Floor" is what the arithmetic predicts, at the rate of a large matrix product and the bandwidth of a large copy,
measured in the same run:

    score     operations of all slots (copies, BOS and text) and of the vocabulary projection of asked tokens
    sample    the same operations without asked tokens, for the prefill; then, for each step, the weights once and the
              keys and values of all rows
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import SIZES, VOCABULARY, build_model, clock, copy_bandwidth, machine, report
from figures import draw_scaling
from result_tables import scaling_rows
from transformers import PreTrainedModel

from acgpt import Query
from acgpt.engine.attention import check_model
from acgpt.engine.decode import Sampling
from acgpt.engine.engine import Engine
from acgpt.report.pictures import render_figure
from acgpt.training.learner import Work, matmul_rate

BLOCK = 32
BOS = 50256
KINDS = ("score", "sample")


@dataclass(frozen=True)
class Case:
    """Sizes of the texts of a measurement.

    Args:
        length: Tokens per text, BOS included.
        share: Share of given tokens.
        batch: Number of texts.
    """

    length: int
    share: float
    batch: int


@dataclass(frozen=True)
class Point:
    """A measurement.

    Args:
        kind: "score" or "sample".
        axis: Field of `Case` that is varied.
        case: The sizes.
        seconds: Median time.
        floor: Predicted time.
        tokens: Number of asked tokens.
        memory: Largest number of bytes allocated on a GPU, weights included; `None` on a CPU.
    """

    kind: str
    axis: str
    case: Case
    seconds: float
    floor: float
    tokens: int
    memory: int | None


@dataclass(frozen=True)
class Limits:
    """What a device can do: operations and bytes per second."""

    operations: float
    bandwidth: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="124M", choices=SIZES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--length", type=int, default=1024, help="length where another number is varied")
    parser.add_argument("--share", type=float, default=0.3, help="share of given tokens, likewise")
    parser.add_argument("--batch", type=int, default=16, help="number of texts, likewise")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="also draw a figure into this PNG file")
    args = parser.parse_args()
    if min([*args.lengths, args.length]) < 2 * BLOCK:
        parser.error(f"a text has at least {2 * BLOCK} tokens.")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = build_model(args.size, args.device, dtype, positions=max([*args.lengths, args.length]))
    check_model(model)
    limits = Limits(matmul_rate(args.device), copy_bandwidth(args.device))
    base = Case(args.length, args.share, args.batch)
    cases = {
        "length": [Case(length, base.share, base.batch) for length in args.lengths],
        "share": [Case(base.length, share, base.batch) for share in args.shares],
        "batch": [Case(base.length, base.share, batch) for batch in args.batches],
    }
    points = []
    for kind in args.kinds:
        measured: dict[Case, Point] = {}  # the same case can be on several axes
        for axis, sizes in cases.items():
            for case in sizes:
                if case not in measured:
                    measured[case] = measure(model, kind, case, axis, limits, args.repeats)
                points.append(asdict(measured[case]) | {"axis": axis})
    record = {
        "benchmark": "scaling",
        **machine(args.device),
        "size": args.size,
        "dtype": str(dtype).removeprefix("torch."),
        **asdict(limits),
        "points": points,
    }
    if args.plot:
        draw = functools.partial(draw_scaling, json.dumps(points))
        args.plot.write_bytes(render_figure(draw)["png"])
    title = f"{args.size}, {dtype}, {machine(args.device)['hardware']}"
    report(title, *scaling_rows(points), record)


def measure(model: PreTrainedModel, kind: str, case: Case, axis: str, limits: Limits, repeats: int) -> Point:
    """Time one case, with an engine of its own: another case's decoder would count as memory of this one."""
    engine = Engine(model, bos=BOS, mask=None, budget=2**32 // (4 * VOCABULARY))
    cuda = engine.cuda
    queries = random_queries(case)
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    @torch.inference_mode()
    def work() -> None:
        if kind == "score":
            engine.log_probs(queries, future=True)
        else:
            engine.sample(queries, 1, Sampling(temperature=0.8, top_p=0.95, seed=0), future=True)

    seconds = clock(work, repeats=repeats)
    memory = torch.cuda.max_memory_allocated() if cuda else None
    print(f"{kind}, {case}: {seconds:.3f} s", file=sys.stderr, flush=True)
    floors = {"score": score_floor, "sample": sample_floor}
    asked = sum(len(query.asked_at) for query in queries)
    return Point(kind, axis, case, seconds, floors[kind](engine, queries, limits), asked, memory)


def random_queries(case: Case) -> list[Query]:
    """Return random texts of which a share of the tokens is given, in blocks at random positions."""
    rng, length = random.Random(0), case.length - 1
    queries = []
    for _ in range(case.batch):
        blocks = -(-length // BLOCK)
        chosen = set(rng.sample(range(blocks), min(blocks - 1, round(case.share * blocks))))
        given = [t // BLOCK in chosen for t in range(length)]
        queries.append(Query([rng.randrange(VOCABULARY) for _ in range(length)], given))
    return queries


def forward_operations(model: PreTrainedModel, copies: int, texts: int, asked: int) -> float:
    """Return the operations of a forward pass over copies and text slots of one text."""
    pairs = copies * (copies + texts) + texts * (texts + 1) // 2
    return Work.of(model).total(slots=copies + texts, pairs=pairs, asked=asked) / 3  # of forward and backward


def text_slots(query: Query) -> tuple[int, int]:
    """Return the number of copies, and of the slots from BOS to the one that predicts the last asked token."""
    return len(query.given_positions), int(query.asked_positions[-1])


def score_floor(engine: Engine, queries: list[Query], limits: Limits) -> float:
    """Return the predicted seconds to score queries."""
    operations = sum(forward_operations(engine.model, *text_slots(q), len(q.asked_at)) for q in queries)
    return operations / limits.operations


def sample_floor(engine: Engine, queries: list[Query], limits: Limits) -> float:
    """Return the predicted seconds to sample queries: those of the prefill, and the longer of reading and computing."""
    model = engine.model
    prefill = steps = keys = operations = 0.0
    for query in queries:
        copies, texts = text_slots(query)
        asked = len(query.asked_at)
        prefill += forward_operations(model, copies, texts - asked, 0)
        operations += forward_operations(model, copies, texts, asked) - forward_operations(
            model, copies, texts - asked, 0
        )
        keys += sum(copies + int(position) for position in query.asked_positions) * engine.slot_bytes
        steps = max(steps, asked)
    weights = sum(weight.nbytes for weight in model.parameters())
    decoding = max((steps * weights + keys) / limits.bandwidth, operations / limits.operations)
    return prefill / limits.operations + decoding


if __name__ == "__main__":
    main()
