"""The training loop: what a run does in each of its steps, on every process.

    batches of the step ──► loss ──► gradients ──► clipped ──► optimizer, at the rate of the step
        now and then        a row of the log, with the perplexities of an evaluation; a checkpoint
        on request          a checkpoint, and the end

The loss of a step is the mean over all asked tokens of the step, over every process and every accumulated batch,
however many of them a batch has. Accelerate wraps the network for mixed precision, DDP and FSDP.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from acgpt.engine.device import matrix_products
from acgpt.engine.engine import Engine
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationDataset, name_texts
from acgpt.evaluation.perplexity import Evaluation, evaluate
from acgpt.methods import Method
from acgpt.training.batches import Batch, Batches
from acgpt.training.learner import Learner, Work, matmul_rate
from acgpt.training.loader import loading
from acgpt.training.log import DURING, Log, ProgressLine, Row, board
from acgpt.training.networks import Tuned
from acgpt.training.optimizer import build_optimizer, rate
from acgpt.training.plan import Plan
from acgpt.training.recipe import Recipe
from acgpt.training.run_folder import BOARD, LOG, step_of
from acgpt.training.state import State
from acgpt.training.stopping import StopRequests


@dataclass
class Watch:
    """Measurements of this process since the last row of the log."""

    steps: int = 0
    waited: float = 0.0  # seconds spent waiting for data
    flops: float = 0.0
    since: float = field(default_factory=time.perf_counter)


class Loop:
    """The steps of a run.

    Args:
        recipe: The recipe.
        plan: What the recipe comes to on this machine.
        accelerator: Wraps the network, and speaks with the other processes.
        learner: The network and its loss.
        batches: The batches of all steps.
        product: What is trained.
        method: How the model is asked in evaluations.
        evaluation_dataset: Texts to evaluate on during training, if any.
        stopping: Requests to stop the run.
        quiet: Show no progress.

    Attributes:
        state: The network and its optimizer.
        step: Number of steps done.
        stopped: Whether the run was stopped on request.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        accelerator: Accelerator,
        learner: Learner,
        batches: Batches,
        *,
        product: Tuned,
        method: Method,
        evaluation_dataset: EvaluationDataset | None,
        stopping: StopRequests,
        quiet: bool,
    ) -> None:
        self.recipe, self.plan, self.accelerator, self.batches = recipe, plan, accelerator, batches
        self.folder, self.method, self.stopping = Path(recipe.output), method, stopping
        self.evaluation_dataset, self.step, self.stopped = evaluation_dataset, 0, False
        self.eval_every = 0 if evaluation_dataset is None else recipe.eval_every
        random.seed(recipe.seed)
        np.random.seed(recipe.seed)
        torch.manual_seed(recipe.seed + accelerator.process_index)  # processes with other texts need other dropout
        if not plan.fsdp:
            learner.to(accelerator.device)
        optimizer = build_optimizer(
            learner.model, learner.length_head, muon=recipe.optimizer == "muon", lr=recipe.lr,
            muon_lr=recipe.muon_lr or 0.0, betas=recipe.betas, weight_decay=recipe.weight_decay,
        )  # fmt: skip
        self.state = State(accelerator, learner, optimizer, product)
        self.peaks = [group["lr"] for group in self.state.optimizer.param_groups]
        self.work, self.peak_flops = Work.of(self.state.network), matmul_rate(accelerator.device)
        self.cuda = accelerator.device.type == "cuda"
        self.loss = torch.zeros((), device=accelerator.device)  # sum of the steps since the last row
        self.loaded: Iterator[Batch] = iter(())  # those of this process, in their order
        self.log, self.watch = Log(self.folder / LOG, write=self.state.main), Watch()
        texts = "" if evaluation_dataset is None else name_texts(evaluation_dataset.as_dict())
        self.bar = ProgressLine(quiet or not self.state.main, method.bound, texts)
        self.board: Any = None  # TensorBoard's writer, where TensorBoard is installed

    def run(self, checkpoint: Path | None) -> None:
        """Take the steps of the run, or those after a checkpoint, until it ends or is to stop."""
        if checkpoint is not None:
            self.state.load(checkpoint)
            self.step = step_of(checkpoint)
        self.log.start(self.step)
        self.seconds = self.log.seconds
        self.board = board(self.folder / BOARD, self.step) if self.state.main else None
        self.bar.start(self.step, self.plan.steps)
        first = self.step * self.plan.parts + self.accelerator.process_index
        numbers = range(first, len(self.batches), self.plan.processes)
        try:
            with loading(self.batches, numbers, self.recipe.workers, pinned=self.cuda) as self.loaded:
                self.watch = Watch()
                while self.step < self.plan.steps and not self.stopped:
                    self.take_step()
        finally:
            self.loaded = iter(())  # ends the workers, which hold the lock of the folder, though an error may be kept

    def take_step(self) -> None:
        """Take one step, and do what is due after it."""
        start = time.perf_counter()
        device = self.accelerator.device
        batches = [batch.to(device, non_blocking=self.cuda) for batch in islice(self.loaded, self.plan.accumulation)]
        self.watch.waited += time.perf_counter() - start
        norm = self.learn(batches)
        self.step += 1
        self.stopping.step_done()
        self.bar.advance(self.step)
        last = self.step == self.plan.steps
        self.stopped = not last and self.should_stop()
        saves = last or self.stopped or self.step % self.recipe.save_every == 0
        if saves or self.evaluates or self.step == 1 or self.step % self.recipe.log_every == 0:
            self.report(norm)  # also where it is saved or evaluated: the log of a resumed run has no gap
        if saves:
            self.state.save(self.folder, self.step, self.recipe.keep)

    def learn(self, batches: list[Batch]) -> Tensor:
        """Change the weights by one step, and return the norm of its gradient before clipping."""
        recipe, model, optimizer = self.recipe, self.state.model, self.state.optimizer
        share = rate(
            self.step, steps=self.plan.steps, warmup=recipe.warmup, shape=recipe.schedule, final=recipe.final_lr or 0.0,
            cooldown=recipe.cooldown or 1.0,
        )  # fmt: skip
        for group, peak in zip(optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * share
        # Not torch.tensor, which waits for the device.
        weight = torch.full((), sum(batch.weight for batch in batches), device=self.loss.device, dtype=torch.float32)
        weight = self.accelerator.reduce(weight, "sum") if self.plan.processes > 1 else weight
        scale = self.plan.processes / weight.clamp(min=1)  # processes average their gradients; a step may ask nothing
        model.train()
        for batch in batches:
            final = batch is batches[-1]
            with nullcontext() if final else self.accelerator.no_sync(model):
                loss = model(batch=batch) * scale
                self.accelerator.backward(loss)
            self.loss += loss.detach()
        norm: Tensor = self.accelerator.clip_grad_norm_(model.parameters(), recipe.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        counts = {name: sum(getattr(batch, name) for batch in batches) for name in ("slots", "pairs", "asked")}
        self.watch.flops += self.work.total(**counts)
        self.watch.steps += 1
        return norm

    def should_stop(self) -> bool:
        """Return whether to stop after this step. Several processes must agree: they vote when the log is written."""
        if self.plan.processes == 1:
            return bool(self.stopping)
        if self.step % self.recipe.log_every:
            return False
        votes = torch.tensor(float(bool(self.stopping)), device=self.loss.device)
        return bool(self.accelerator.reduce(votes, "sum") > 0)

    @property
    def evaluates(self) -> bool:
        """Whether the model is evaluated after this step."""
        return self.eval_every > 0 and (self.step % self.eval_every == 0 or self.step == self.plan.steps)

    def report(self, norm: Tensor) -> None:
        """Write a row of the log.

        Args:
            norm: Norm of the gradient of the last step.
        """
        watch, batches = self.watch, self.batches
        numbers = {"loss": float(self.accelerator.gather(self.loss).mean()) / watch.steps, "grad_norm": float(norm)}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise InputError(
                    f"{name} is {value} at step {self.step}: training has diverged. Lower lr or muon_lr, or lengthen "
                    "warmup."
                )
        elapsed = time.perf_counter() - watch.since
        self.seconds += elapsed
        row: Row = {
            "step": self.step,
            "loss": numbers["loss"],
            "learning_rate": self.state.optimizer.param_groups[0]["lr"],
            "grad_norm": numbers["grad_norm"],
            "texts": self.step * batches.step,
            "tokens": self.step * batches.step * batches.length,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(watch.steps * batches.step * batches.length / elapsed, 1),
            "mfu": round(watch.flops / elapsed / self.peak_flops, 4),
            "wait": round(watch.waited / elapsed, 4),
        }
        if self.evaluates:
            assert self.evaluation_dataset is not None
            answers = self.evaluate(self.evaluation_dataset, DURING).modes
            row |= {mode: round(answer.perplexity, 4) for mode, answer in answers.items() if answer is not None}
        self.log.append(row)
        self.bar.show(row)
        if self.board is not None:
            for name in row.keys() - {"step"}:
                self.board.add_scalar(name, row[name], self.step)
        self.loss = torch.zeros_like(self.loss)
        self.watch = Watch()  # the time of an evaluation does not count as training

    def evaluate(self, evaluation_dataset: EvaluationDataset, modes: tuple[str, ...] = ()) -> Evaluation:
        """Evaluate the network as it is now; every process must call it."""
        metadata = self.state.product.metadata
        with self.state.whole() as network, matrix_products("highest"):  # the precision of `acgpt evaluate`
            engine = Engine(network, bos=metadata.bos_token_id or 0, mask=metadata.mask_token_id)
            return evaluate(self.method, engine, evaluation_dataset, modes=modes, progress=self.bar.evaluated)

    def close(self) -> None:
        """Stop the bar and close the board."""
        self.bar.stop()
        if self.board is not None:
            self.board.close()
            self.board = None
