"""Sampling: our cached, batched decoding against transformers' `generate`, and `acgpt generate` by method.

    python benchmarks/sampling.py --size 124M --batch 64 --tokens 1024
    python benchmarks/sampling.py --device cpu --size tiny --batch 4 --tokens 64
    python benchmarks/sampling.py --generate --size 82M --batch 200 --methods gpt ac-gpt sigma-gpt-temporal fim
    python benchmarks/sampling.py --generate --size 82M --batch 32 --methods gpt mlm diffusion --compile

All use the same model, batch, lengths and sampling (temperature 0.8, top-p 0.95, as in the paper), from token ids to
token ids: the conversion to text by `LanguageModel.sample` is not included. "Left to right" starts from BOS alone,
which `generate` can do, too. "Scattered" has 30 % of the tokens given at random positions, "blocks" 60 % in blocks of
32; both use copies, and only asked tokens are counted.

`--generate` times `acgpt generate` instead, including writing the files: every method in every mode, `--batch` texts of
`--tokens` tokens at r_max 0.6. "outside" is the share of the time outside the model, and "ratio" is that to GPT in the
same mode, or in the same mode without the future. All methods are timed in turns, after two turns that do not count: a
decoder that grew in the first captures its steps again. Garbage is collected before each measurement.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import BOS, SIZES, VOCABULARY, Parser, build_model, clock, copy_bandwidth, dtype_on, print_record
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from acgpt import LanguageModel, Query
from acgpt.engine.architecture import check_model
from acgpt.engine.attention import choose_backend
from acgpt.engine.engine import Engine
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.generator import Generator
from acgpt.methods import METHODS
from acgpt.models.metadata import Metadata
from acgpt.query.modes import MODES
from acgpt.query.sampling import Sampling
from acgpt.training.learner import new_model
from acgpt.training.recipe import SHAPES


def main() -> None:
    parser = Parser(__doc__)
    parser.add_device()
    parser.add_argument("--size", default="124M", choices=SIZES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024, help="positions per text, including BOS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--generate", action="store_true", help="time acgpt generate: methods in every mode")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="with --generate: only these methods")
    parser.add_argument("--compile", action="store_true", help="with --generate: compile mlm and diffusion")
    parser.add_argument("--batch-tokens", type=int, help="with --generate: maximum tokens per forward pass")
    args = parser.parse_args()
    (time_generate_command if args.generate else time_engine)(args)


# ---- the engine against generate ------------------------------------------------------------------------------------


def random_queries(batch: int, length: int, share: float, block: int) -> list[Query]:
    """Return random texts of which a share of the tokens is given, in blocks at random positions."""
    rng, queries = random.Random(0), []
    for _ in range(batch):
        chosen = set(rng.sample(range(-(-length // block)), int(share * length / block)))
        given = [t // block in chosen for t in range(length)]
        queries.append(Query([rng.randrange(VOCABULARY) if is_given else None for is_given in given], given))
    return queries


def time_engine(args: argparse.Namespace) -> None:
    """Time our decoding and that of transformers."""
    length = args.tokens - 1  # BOS takes the first position
    ours, theirs = (build_model(args.size, args.device) for _ in range(2))
    check_model(ours)
    backend, sampling = choose_backend(ours), Sampling(temperature=0.8, top_p=0.95, seed=0)
    prompt = torch.full((args.batch, 1), BOS, device=args.device)

    @torch.inference_mode()
    def sample(queries: list[Query], n: int = 1) -> tuple[float, int]:
        engine = Engine(ours, bos=BOS, mask=None, backend=backend, budget=2**30 // VOCABULARY)
        seconds = clock(lambda: engine.sample(queries, n, sampling, future=True), args.repeats)
        return seconds, n * sum(len(query.asked_positions) for query in queries)

    def generate(**options: Any) -> tuple[float, int]:
        config = GenerationConfig(
            do_sample=True, temperature=0.8, top_p=0.95, top_k=0, max_new_tokens=length, min_new_tokens=length,
            pad_token_id=BOS, **options,
        )  # fmt: skip
        inputs = {"attention_mask": torch.ones_like(prompt), "generation_config": config}
        return clock(lambda: theirs.generate(prompt, **inputs), args.repeats), args.batch * length

    results = {
        "acgpt, left to right": sample([Query([None] * length, [False] * length)], args.batch),
        "acgpt, scattered tokens given": sample(random_queries(args.batch, length, share=0.3, block=1)),
        "acgpt, blocks given": sample(random_queries(args.batch, length, share=0.6, block=32)),
        "generate": generate(),
    }
    if args.device == "cuda":
        results["generate, static cache, compiled"] = generate(cache_implementation="static")
    base = results["generate"][1] / results["generate"][0]
    rows = [
        {"row": name, "seconds": seconds, "tokens_per_second": count / seconds, "ratio": count / seconds / base}
        for name, (seconds, count) in results.items()
    ]
    bandwidth, config, item = copy_bandwidth(args.device), ours.config, ours.dtype.itemsize
    weights = sum(p.numel() for p in ours.parameters()) * item
    cache = 2 * config.num_hidden_layers * config.hidden_size * item * args.batch * length * (length + 1) // 2
    share = (weights * length + cache) / results["acgpt, left to right"][0] / bandwidth
    print_record(
        "sampling", f"{args.size}, batch {args.batch}", rows, args.device, tokens=args.tokens, repeats=args.repeats,
        left_to_right_share_of_bandwidth=share, copy_bytes_per_second=bandwidth,
    )  # fmt: skip


# ---- acgpt generate --------------------------------------------------------------------------------------------------


def make_generator(name: str, args: argparse.Namespace) -> Generator:
    """Return what `acgpt generate` uses for a method, with a model of random weights and texts of random tokens."""
    method, length = METHODS[name], args.tokens - 1
    tokens = np.random.default_rng(0).integers(0, BOS, args.batch * length)
    model = new_model(
        SHAPES[SIZES[args.size]], vocabulary=VOCABULARY + method.needs_mask, positions=length + method.overhead,
        network=method.network,
    )  # fmt: skip
    tokenizer = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(VOCABULARY)}, unk_token="Ġw0"))
    tokenizer.decoder = decoders.ByteLevel()  # decoding takes as long as with GPT-2's tokenizer
    lm = LanguageModel(
        model.to(args.device, dtype_on(args.device)).eval(), PreTrainedTokenizerFast(tokenizer_object=tokenizer),
        metadata=Metadata(method=name), bos=BOS, mask=VOCABULARY if method.needs_mask else None,
    )  # fmt: skip
    return Generator(
        lm, EvaluationDataset.build(tokens, tokenizer_hash="", length=length), prompt=min(20, length - 1),
        budget=args.batch_tokens, compiled=args.compile and method.compiles,
    )  # fmt: skip


def time_generate_command(args: argparse.Namespace) -> None:
    """Time `acgpt generate` for every method and mode; weights are random, which does not change the time."""
    generators = {name: make_generator(name, args) for name in args.methods}
    pairs = [(name, mode) for mode in MODES for name in args.methods if generators[name].answers(mode)]
    pairs.sort(key=lambda pair: MODES[pair[1]].conditioning)  # rows that are compared follow each other
    timed: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    for turn in range(-2, args.repeats):
        for name, mode in pairs:
            if turn < (-1 if args.compile else 0) and METHODS[name].compiles:
                continue  # these capture nothing
            gc.collect()
            with tempfile.TemporaryDirectory() as folder:
                record = generators[name].write(mode, Path(folder))
            assert record is not None
            print(f"{turn}: {name}, {mode}: {record['seconds']:.2f} s", file=sys.stderr, flush=True)
            if turn >= 0:
                timed[name, mode].append(record)
    # The record of (lower) median time of each pair.
    medians = {
        pair: sorted(records, key=lambda record: record["seconds"])[(len(records) - 1) // 2]
        for pair, records in timed.items()
    }
    rows = []
    for (name, mode), record in medians.items():
        gpt = medians.get(("gpt", mode)) or medians.get(("gpt", f"{mode}-no-future"))
        rows.append(
            {
                "row": f"{name}, {mode}",
                "seconds": record["seconds"],
                "tokens_per_second": record["tokens_per_second"],
                "ratio": record["tokens_per_second"] / gpt["tokens_per_second"] if gpt else None,
                "calls": record["calls"],
                "outside_percent": 100 * record["outside"],
            }
        )
    case = f"acgpt generate, {args.size}, {args.batch} texts"
    print_record("sampling", case, rows, args.device, tokens=args.tokens, repeats=args.repeats)


if __name__ == "__main__":
    main()
