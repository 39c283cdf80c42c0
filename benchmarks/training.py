"""Training: the step time of AC-GPT relative to GPT on the same number of sequences, in one run.

    python benchmarks/training.py --size 82M
    python benchmarks/training.py --size 124M --texts 48
    python benchmarks/training.py --base default --lora 64 --texts 32 --recipe default-adapter      # fine-tuning
    python benchmarks/training.py --device cpu --size tiny --texts 4 --tokens 128 --steps 3

A step is complete: the loader's batch, forward, backward, clipping, Muon and AdamW (fine-tuning: AdamW alone). The two
methods alternate in rounds, so that a change of the machine's clock rate affects both. "wait" is the share of the time
in which the loop waits for its next batch. MFU is relative to the measured rate of a large matrix product. "floor" is
the ratio of the floating-point operations that the two methods need. With --lora a third row has the products of the
adapter computed apart, as PEFT does (see `acgpt.engine.peft.join_products`).
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from common import SIZES, Parser, print_record, synchronize
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from acgpt.engine.architecture import check_model
from acgpt.engine.length_head import LengthHead
from acgpt.engine.peft import add_lora
from acgpt.models.loading import load_base, resolve
from acgpt.query.conditioning import Conditioning
from acgpt.training.batches import Batches
from acgpt.training.learner import Learner, Work, matmul_rate, new_model
from acgpt.training.optimizer import build_optimizer
from acgpt.training.recipe import SHAPES, load_recipe

VOCABULARY = 50304


class RandomTexts:
    """Texts of random tokens, on which speed does not depend."""

    def __init__(self, count: int, vocabulary: int) -> None:
        self.count, self.vocabulary = count, vocabulary

    def chunks(self, length: int) -> int:
        return self.count

    def chunk(self, number: int, length: int) -> np.ndarray:
        return np.random.default_rng(number).integers(0, self.vocabulary, length)


def make_model(args: argparse.Namespace) -> PreTrainedModel:
    """Build a model of the chosen size, or load a pretrained one, with or without an adapter."""
    if args.base is None:
        return new_model(SHAPES[SIZES[args.size]], vocabulary=VOCABULARY, positions=args.tokens)
    frozen = torch.bfloat16 if args.device == "cuda" else torch.float32
    model, _ = load_base(resolve(args.base, False)[0], frozen if args.lora else torch.float32)
    check_model(model)
    return add_lora(model, rank=args.lora, alpha=2 * args.lora)[0] if args.lora else model


class Runner:
    """One method, ready to take steps."""

    def __init__(self, conditioning: Conditioning, args: argparse.Namespace, *, joined: bool) -> None:
        self.device, self.cuda = args.device, args.device == "cuda"
        model = make_model(args).to(args.device).train()
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        head = LengthHead(model.get_output_embeddings().weight.shape[1]) if conditioning.asks_lengths else None
        self.learner = Learner(
            model,
            backend="fused" if self.cuda else "dense",
            compiled=self.cuda,
            length_head=head and head.to(args.device),
            joined=joined and self.cuda,
        )
        muon = args.base is None
        self.optimizer = build_optimizer(model, muon=muon, lr=1e-3, muon_lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        batches = Batches(
            RandomTexts(args.texts * 256, min(VOCABULARY, model.config.get_text_config().vocab_size)),
            count=args.steps * args.rounds + 10,
            size=args.texts,
            length=args.tokens - 1,
            conditioning=conditioning,
            seed=0,
            bos=0,
            mask=1 if conditioning.has_unknown else None,
            fixed=self.cuda,
            kinds=np.random.default_rng(0).choice([0, 1, 17, 2, 4], size=VOCABULARY).astype(np.uint8),
        )
        workers = {"num_workers": 4, "prefetch_factor": 4, "pin_memory": True} if self.cuda else {}
        self.loader = iter(DataLoader(batches, batch_size=None, shuffle=False, **workers))
        self.waited, self.flops, self.work = 0.0, 0.0, Work.of(model)

    def step(self) -> None:
        start = time.perf_counter()
        batch = next(self.loader)
        self.waited += time.perf_counter() - start
        self.flops += self.work.total(slots=batch.slots, pairs=batch.pairs, asked=batch.asked)
        batch = batch.to(self.device, non_blocking=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
            loss = self.learner(batch) / batch.weight
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def round(self, steps: int) -> float:
        """Take steps and return the seconds per step."""
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        return (time.perf_counter() - start) / steps


def main() -> None:
    parser = Parser(__doc__)
    parser.add_device()
    parser.add_argument("--size", default="82M", choices=SIZES)
    parser.add_argument("--base", help="fine-tune this model instead: a folder, a hub id, a .gguf file, or default")
    parser.add_argument("--lora", type=int, help="with --base: rank of a LoRA adapter; default: tune all weights")
    parser.add_argument("--texts", type=int, default=64, help="sequences per step")
    parser.add_argument("--tokens", type=int, default=1024, help="positions per sequence, including BOS")
    parser.add_argument("--recipe", help="conditioning of this recipe; default: r_max 0.6")
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    given = {"r_max": 0.6} if args.recipe is None else load_recipe(args.recipe).conditioning
    methods = {"GPT": {"empty": 1.0}, "AC-GPT": given}
    if args.lora:
        methods["AC-GPT, adapter apart"] = given
    runners, gib = {}, {}
    for name, conditioning in methods.items():
        before = torch.cuda.memory_allocated()  # 0 without a GPU
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        runners[name] = Runner(Conditioning.from_dict(conditioning), args, joined="apart" not in name)
        runners[name].round(3)
        gib[name] = (torch.cuda.max_memory_allocated() - before) / 2**30 if args.device == "cuda" else None
        runners[name].waited = runners[name].flops = 0.0
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(args.rounds):
        for name, runner in runners.items():
            times[name].append(runner.round(args.steps))
    peak, rows = matmul_rate(args.device), []
    for name, runner in runners.items():
        step = statistics.median(times[name])
        rows.append(
            {
                "row": name,
                "milliseconds": 1000 * step,
                "relative_time": step / statistics.median(times["GPT"]),
                "floor": runner.flops / runners["GPT"].flops,
                "tokens_per_second": args.texts * args.tokens / step,
                "mfu_percent": 100 * runner.flops / (args.rounds * args.steps) / step / peak,
                "wait_percent": 100 * runner.waited / sum(times[name]) / args.steps,
                "gib": gib[name],
            }
        )
    case = args.size if args.base is None else f"{args.base}, {f'LoRA r={args.lora}' if args.lora else 'all weights'}"
    settings = {name: vars(args)[name] for name in ("texts", "tokens", "recipe", "steps", "rounds")}
    print_record("training", case, rows, args.device, **settings, matmul_tflops=peak / 1e12)


if __name__ == "__main__":
    main()
