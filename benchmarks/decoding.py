"""Sampling: our cached, batched decoding against transformers' `generate` and a loop without a cache.

    python benchmarks/decoding.py --device cuda --size 124M --batch 64 --tokens 1024
    python benchmarks/decoding.py --device cuda --size 124M --batch 1 --tokens 1024 --rows compiled
    python benchmarks/decoding.py --device cpu --size tiny --batch 4 --tokens 64
    python benchmarks/decoding.py --generate --device cuda --size 82M --batch 200 --tokens 1024

All use the same model, batch, lengths and sampling (temperature 0.8, top-p 0.95, as in the paper), from token ids to
token ids: the conversion to text by `LanguageModel.sample` is not included. "Left to right" starts from BOS alone,
which `generate` can do, too. "Scattered" has 30 % of the tokens given at random positions, "blocks" 60 % in blocks of
32; both use copies, and only asked tokens are counted. They run with several step widths: 1 is lockstep, 128 lets
(nearly) every row read its whole run of given tokens at once, `auto` is the choice of acgpt. The loop without a cache
is timed at eight lengths and integrated by the trapezoidal rule.

`--generate` times `acgpt generate` instead: every method in every mode, `--batch` texts of `--tokens` tokens at r_max
0.6, including writing the files. "Outside" is the share of the time outside the model. Methods that capture their steps
sample twice before they are timed, compiled methods once and in one mode. All methods are timed in turns, `--repeats`
times, and stay on the device meanwhile. The table shows the (lower) median, with the shortest and the longest time.
Garbage is collected before each measurement.
Every step of AC-GPT reads the keys and values of copies, which GPT does not have. "Keys" is the time for that at the
rate of a large copy. "Reading" is the additional time of the attention kernel for all these steps, by itself, over
those of GPT. "Prefill" is the time on the device, before the first step, to read what precedes the first asked token
and, for AC-GPT, the copies. "s longer" is the additional time of a row over GPT's in the same turn, in all and in the
model.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import SIZES, VOCABULARY, build_model, clock, copy_bandwidth, machine, report
from result_tables import generation_table, keys_table
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from acgpt import LanguageModel, Query
from acgpt.engine import decode
from acgpt.engine import engine as engine_module
from acgpt.engine.attention import Ragged, check_model, choose_backend, head_width
from acgpt.engine.decode import Rows, Sampling
from acgpt.engine.engine import Call, Engine
from acgpt.engine.steps import Row, Steps, choose_width, few_shapes, steps_of
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.generator import Generator, choose_future
from acgpt.methods import METHODS
from acgpt.models.metadata import Metadata
from acgpt.query.modes import MODES
from acgpt.training.learner import new_model
from acgpt.training.recipe import Shape

BOS = 50256
ROWS = ("no cache", "generate", "scattered", "blocks", "compiled")


def kv_bytes(model: PreTrainedModel, rows: int, tokens: int) -> int:
    """Return the least bytes of keys and values that decoding `tokens` tokens has to read."""
    config = model.config
    return 2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize * rows * tokens * (tokens + 1) // 2


def random_queries(batch: int, length: int, share: float, block: int) -> list[Query]:
    """Return random texts of which a share of the tokens is given, in blocks at random positions."""
    rng, queries = random.Random(0), []
    for _ in range(batch):
        chosen = set(rng.sample(range(-(-length // block)), int(share * length / block)))
        given = [t // block in chosen for t in range(length)]
        queries.append(Query([rng.randrange(VOCABULARY) if is_given else None for is_given in given], given))
    return queries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="124M")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help="skip generate and the loop without a cache")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="time only these rows, besides ours from left to right")
    parser.add_argument("--profile", action="store_true", help="print a profile of our decoding and stop")
    parser.add_argument("--generate", action="store_true", help="time acgpt generate: every method in every mode")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="with --generate: only these methods")
    parser.add_argument("--modes", nargs="+", default=list(MODES), help="with --generate: only these modes")
    parser.add_argument("--compile", action="store_true", help="with --generate: compile mlm and diffusion")
    parser.add_argument(
        "--batch-tokens", type=int, help="with --generate: maximum tokens per forward pass, as in acgpt generate"
    )
    parser.add_argument("--width", type=int, help="with --generate: step width, instead of the choice of acgpt")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1.")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    if args.generate:
        fixed_width = patch.object(engine_module, "choose_width", lambda *_: args.width)
        with fixed_width if args.width else nullcontext():
            generation(args, dtype)
        return
    steps = args.tokens - 1  # BOS takes the first position
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=0)

    ours = build_model(args.size, args.device, dtype)
    check_model(ours)
    backend = choose_backend(ours)
    budget = 2**32 // (4 * VOCABULARY)

    def new_engine() -> Engine:
        return Engine(ours, bos=BOS, mask=None, backend=backend, budget=budget)

    left_to_right = [Query([None] * steps, [False] * steps)]
    scattered = random_queries(args.batch, steps, share=0.3, block=1)
    blocks = random_queries(args.batch, steps, share=0.6, block=32)

    @torch.inference_mode()
    def time_ours(queries: list[Query], n: int, width: int | None = None) -> float:
        engine = new_engine()
        if width is None:
            return clock(lambda: engine.sample(queries, n, sampling, future=True), repeats=args.repeats)
        with patch.object(engine_module, "choose_width", lambda *_: width):
            return clock(lambda: engine.sample(queries, n, sampling, future=True), repeats=args.repeats)

    if args.profile:
        profile(new_engine(), left_to_right, args.batch, sampling)
        return

    theirs = build_model(args.size, args.device, dtype)
    prompt = torch.full((args.batch, 1), BOS, device=args.device)

    def generate(**options: Any) -> float:
        config = GenerationConfig(
            do_sample=True, temperature=0.8, top_p=0.95, top_k=0, max_new_tokens=steps, min_new_tokens=steps, **options
        )
        mask = torch.ones_like(prompt)
        return clock(
            lambda: theirs.generate(prompt, attention_mask=mask, generation_config=config), repeats=args.repeats
        )

    @torch.inference_mode()
    def no_cache() -> float:
        lengths = torch.linspace(1, steps, 8).long().tolist()
        text = torch.randint(VOCABULARY, (args.batch, steps), device=args.device)
        uniform = torch.rand(args.batch, device=args.device)

        def step(length: int) -> None:
            logits = theirs(text[:, :length], use_cache=False, logits_to_keep=1).logits[:, -1]
            decode.draw(logits, uniform, sampling)

        seconds = [clock(lambda length=length: step(length), repeats=2) for length in lengths]
        return float(torch.trapezoid(torch.tensor(seconds), torch.tensor(lengths, dtype=torch.float)))

    tokens = args.batch * steps
    chosen = set(args.rows or (("scattered", "blocks") if args.ours else ROWS))
    results: dict[str, tuple[float, int]] = {"acgpt, left to right": (time_ours(left_to_right, args.batch), tokens)}
    if "no cache" in chosen:
        results["no cache"] = no_cache(), tokens
    if "generate" in chosen:
        results["generate"] = generate(), tokens
    for name, queries in (("scattered", scattered), ("blocks", blocks)):
        if name not in chosen:
            continue
        asked = sum(len(query.asked_positions) for query in queries)
        for width in (None, 1, 2, 4, 8, 16, 128):
            results[f"acgpt, {name}, width {width or 'auto'}"] = (time_ours(queries, 1, width), asked)
    if args.device == "cuda" and "compiled" in chosen:  # transformers compiles it
        results["generate, static cache, compiled"] = (generate(cache_implementation="static"), tokens)

    rate = {name: count / seconds for name, (seconds, count) in results.items()}
    bandwidth = copy_bandwidth(args.device)
    weights = sum(p.numel() for p in ours.parameters()) * dtype.itemsize
    seconds = results["acgpt, left to right"][0]
    share = (weights * steps + kv_bytes(ours, args.batch, steps)) / seconds / bandwidth
    base = "generate" if "generate" in results else "acgpt, left to right"
    ratio = {name: rate[name] / rate[base] for name in rate}
    rows = [[name, f"{results[name][0]:.2f}", f"{rate[name]:,.0f}", f"{ratio[name]:.2f}"] for name in results]
    record = {
        "benchmark": "decoding",
        **vars(args),
        **machine(args.device),
        "seconds": {name: seconds for name, (seconds, _) in results.items()},
        "tokens_per_second": rate,
        f"over {base}": ratio,
        "copy_bandwidth": bandwidth,
        "bandwidth_share": share,
    }
    report(
        f"Sampling {args.batch} × {args.tokens} tokens, {args.size}, {dtype}, {machine(args.device)['hardware']}; "
        f"left to right uses {share:.0%} of the {bandwidth / 1e12:.2f} TB/s that a copy reaches",
        ["", "seconds", "tokens/s", f"× {base}"],
        rows,
        record,
    )


def synthetic_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with as many tokens as GPT-2's: decoding takes as long."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(VOCABULARY)}, unk_token="Ġw0"))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def generation(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Time `acgpt generate` for every method and mode; weights are random, which does not change the time."""
    length = args.tokens - 1  # BOS takes the first position
    tokens = np.random.default_rng(0).integers(0, BOS, args.batch * length)
    evaluation_dataset = EvaluationDataset.build(tokens, tokenizer_hash="", length=length)
    tokenizer, generators = synthetic_tokenizer(), {}
    for name in args.methods:
        method = METHODS[name]
        model = new_model(
            Shape(*SIZES[args.size]), vocabulary=VOCABULARY + method.needs_mask, positions=length + method.overhead,
            network=method.network,
        )  # fmt: skip
        mask = VOCABULARY if method.needs_mask else None
        lm = LanguageModel(
            model.to(args.device, dtype).eval(), tokenizer, metadata=Metadata(method=name), bos=BOS, mask=mask
        )
        compiled = args.compile and method.compiles
        prompt = min(20, length - 1)
        generators[name] = Generator(lm, evaluation_dataset, prompt=prompt, budget=args.batch_tokens, compiled=compiled)
    pairs = [(name, mode) for name in args.methods for mode in args.modes if generators[name].answers(mode)]
    # Rows that are compared are timed one after the other.
    order = sorted(pairs, key=lambda pair: MODES[pair[1]].conditioning)
    timed: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    compiled_mode = dict(pairs)  # its texts take different numbers of passes
    for turn in range(-1, args.repeats + 1):  # two warm-up turns: a decoder that grew in the first captures again
        for name, mode in order:
            if turn < 1 and METHODS[name].compiles and not (turn == 0 and args.compile and mode == compiled_mode[name]):
                continue  # these capture nothing; compiled methods warm up in one mode
            gc.collect()
            with tempfile.TemporaryDirectory() as folder:
                record = generators[name].write(mode, Path(folder))
            assert record is not None
            print(
                f"{turn if turn > 0 else 'before'}: {name}, {mode}: {record['seconds']:.2f} s",
                file=sys.stderr,
                flush=True,
            )
            if turn > 0:
                timed[name, mode].append(record)
    bandwidth = copy_bandwidth(args.device)
    records = {
        f"{name}, {mode}": {
            **summary(repetitions),
            "keys": key_seconds(generators[name], mode, bandwidth),
            "reading": reading_seconds(generators[name], mode),
            "prefill": prefill_seconds(generators[name], mode),
        }
        for (name, mode), repetitions in timed.items()
    }
    settings = {key: value for key, value in vars(args).items() if key not in ("ours", "profile", "generate")}
    report(
        f"Generating {args.batch} × {args.tokens} tokens, {args.size}, {dtype}, {machine(args.device)['hardware']}",
        *generation_table(records),
        {
            "benchmark": "generation",
            **settings,
            **machine(args.device),
            "copy_bandwidth": bandwidth,
            "generation": records,
        },
        keys_table(records),
    )


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of median time, with the times of all."""
    median = sorted(records, key=lambda record: record["seconds"])[(len(records) - 1) // 2]
    selected = {key: median[key] for key in ("tokens", "calls", "seconds", "tokens_per_second", "outside")}
    times = {"times": "seconds", "model_times": "model_seconds"}
    return {**selected, **{name: [record[key] for record in records] for name, key in times.items()}}


def reads_copies(generator: Generator, mode: str) -> bool:
    """Return whether the method reads copies in this mode."""
    return generator.method.name == "ac-gpt" and MODES[mode].future


def steps_of_mode(generator: Generator, mode: str, *, copies: bool = True) -> Steps:
    """Return the steps of a mode on this device, with copies or as if there were none."""
    rows = [Row(query, number, 0) for number, query in enumerate(generator.queries(mode))]
    return steps_of(rows, choose_width(rows, generator.engine.step_cost), copies)


def key_seconds(generator: Generator, mode: str, bandwidth: float) -> float:
    """Return the seconds to read the keys and values of a text's copies once per step, at a given bandwidth."""
    if not reads_copies(generator, mode):
        return 0.0
    steps = steps_of_mode(generator, mode)
    steps_of_row = (steps.reads >= 0).any(-1).sum(0)  # (R,)
    return float((steps.copies * steps_of_row).sum()) * generator.engine.slot_bytes / bandwidth


def reading_seconds(generator: Generator, mode: str) -> float:
    """Return how much longer attention takes, by itself and over all steps of a mode, with copies than without."""
    if not (reads_copies(generator, mode) and generator.engine.ragged):
        return 0.0
    with_copies, without = (steps_of_mode(generator, mode, copies=copies) for copies in (True, False))
    return attention_seconds(generator.engine, with_copies) - attention_seconds(generator.engine, without)


@torch.inference_mode()
def attention_seconds(engine: Engine, steps: Steps) -> float:
    """Return the seconds of attention in all layers over these steps, captured and replayed as in decoding."""
    config, device = engine.model.config, engine.model.device
    heads, dim = config.num_attention_heads, head_width(config)
    shape_of_layer = torch.empty(1, heads, 1, dim, dtype=engine.model.dtype, device=device)
    spare, (_, rows, width) = steps.slots, steps.reads.shape
    layers = Rows([(shape_of_layer, shape_of_layer)] * config.num_hidden_layers, rows, spare + 1).buffers
    slots = np.where(steps.reads >= 0, steps.copies[:, None] + steps.reads, spare)
    all_slots, step_index = torch.from_numpy(slots).to(device), torch.zeros(1, dtype=torch.long, device=device)
    q = torch.randn(rows, heads, width, dim, dtype=engine.model.dtype, device=device)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def step(working: int) -> None:
        backend = Ragged(all_slots.index_select(0, step_index)[0, :working], spare)
        for keys, values in layers:
            backend(q[:working], *(x[:working, :spare].transpose(1, 2) for x in (keys, values)), None)
        step_index.add_(1)

    def read() -> None:
        step_index.zero_()
        for working in few_shapes(steps.working).tolist():
            graphs[working].replay()

    for working in set(few_shapes(steps.working).tolist()):
        step_index.zero_()
        step(working)
        graphs[working] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[working]):
            step(working)
    return clock(read)


def prefill_seconds(generator: Generator, mode: str) -> float:
    """Return the seconds on the device to read everything before the first sampled token (AC-GPT and GPT)."""
    if generator.method.name not in ("ac-gpt", "gpt"):
        return 0.0
    queries, meter = generator.queries(mode), generator.engine.meter
    future = choose_future(generator.method, MODES[mode], queries)
    assert future is not None

    def read() -> float:
        before = meter.seconds
        for _ in generator.engine.prefills(dict(enumerate(queries)), [], Call(Sampling(), future)):
            pass
        return meter.seconds - before

    with torch.inference_mode():
        return statistics.median([read() for _ in range(6)][1:])


def profile(engine: Engine, queries: list[Query], n: int, sampling: Sampling) -> None:
    """Print where the time of left-to-right decoding goes, kernel by kernel."""
    with torch.inference_mode():
        engine.sample(queries, n, sampling, future=True)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as prof:
            engine.sample(queries, n, sampling, future=True)
    print(prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))


if __name__ == "__main__":
    main()
