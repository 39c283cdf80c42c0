"""The callback of a training run: it writes the log, shows progress, evaluates, and stops the run on request."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from acgpt.engine.device import matrix_products
from acgpt.engine.engine import Engine
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.perplexity import Evaluation, evaluate
from acgpt.methods import Method
from acgpt.training.learner import matmul_rate
from acgpt.training.log import DURING, Log, ProgressLine, Row, board
from acgpt.training.run_folder import BOARD, LOG
from acgpt.training.stopping import StopRequests
from acgpt.training.trainer import AcTrainer


class Reporter(TrainerCallback):
    """Write the log, show progress, evaluate, and stop the run on request.

    Args:
        trainer: The trainer of the run.
        folder: Folder of the run.
        method: How the model is asked.
        evaluation_dataset: Texts to evaluate on during training, if any.
        eval_every: Steps between two evaluations; 0: none.
        stopping: Requests to stop the run.
        quiet: Show no progress.
    """

    def __init__(
        self,
        trainer: AcTrainer,
        folder: Path,
        method: Method,
        *,
        evaluation_dataset: EvaluationDataset | None,
        eval_every: int,
        stopping: StopRequests,
        quiet: bool,
    ) -> None:
        self.trainer, self.folder, self.method = trainer, folder, method
        self.evaluation_dataset, self.eval_every = (
            evaluation_dataset,
            eval_every if evaluation_dataset is not None else 0,
        )
        self.main = trainer.args.process_index == 0
        self.peak_flops = matmul_rate(trainer.args.device)
        self.log = Log(folder / LOG, write=self.main)
        self.bar = ProgressLine(quiet or not self.main, method.bound)
        self.board: Any = None  # TensorBoard's writer, where TensorBoard is installed
        self.stopping, self.stopped = stopping, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue the log of the run."""
        state.save_steps, state.logging_steps = args.save_steps, args.logging_steps  # not those of the checkpoint
        self.log.start(state.global_step)
        self.seconds = self.log.seconds
        self.board = board(self.folder / BOARD, state.global_step) if self.main else None
        self.bar.start(state.global_step, state.max_steps)
        self.trainer.restart_watch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Advance the bar. A step that is evaluated or saved gets a row: the log of a resumed run has no gap."""
        self.stopping.step_done()
        self.bar.advance(state.global_step)
        last = state.global_step == state.max_steps
        if not last and self.should_stop(state.global_step):
            self.stopped = control.should_save = control.should_training_stop = True
        if last or self.stopped or self.evaluates(state) or state.global_step % args.save_steps == 0:
            control.should_log = True

    def should_stop(self, step: int) -> bool:
        """Return whether to stop after this step. Several processes must agree: they vote when the log is written."""
        args = self.trainer.args
        if args.world_size == 1:
            return bool(self.stopping)
        if step % int(args.logging_steps):
            return False
        votes = torch.tensor(float(bool(self.stopping)), device=args.device)
        return bool(self.trainer.accelerator.reduce(votes, "sum") > 0)

    def evaluates(self, state: Any) -> bool:
        """Return whether the model is evaluated after this step."""
        return self.eval_every > 0 and (
            state.global_step % self.eval_every == 0 or state.global_step == state.max_steps
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Write a row of the log."""
        if not logs or "loss" not in logs:
            return
        watch, step, batches = self.trainer.watch, state.global_step, self.trainer.batches
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs[name]):
                raise InputError(
                    f"{name} is {logs[name]} at step {step}: training has diverged. Lower lr or muon_lr, or lengthen "
                    "warmup."
                )
        elapsed = time.perf_counter() - watch.since
        self.seconds += elapsed
        row: Row = {
            "step": step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs["grad_norm"],
            "texts": step * batches.step,
            "tokens": step * batches.step * batches.length,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(watch.steps * batches.step * batches.length / elapsed, 1),
            "mfu": round(watch.flops / elapsed / self.peak_flops, 4),
            "wait": round(watch.waited / elapsed, 4),
        }
        if self.evaluates(state):
            assert self.evaluation_dataset is not None
            answers = self.evaluate(self.evaluation_dataset, DURING).modes
            row |= {mode: round(answer.perplexity, 4) for mode, answer in answers.items() if answer is not None}
        self.log.append(row)
        self.bar.show(row)
        if self.board is not None:
            for name in row.keys() - {"step"}:
                self.board.add_scalar(name, row[name], step)
        self.trainer.restart_watch()  # the time of an evaluation does not count as training

    def evaluate(self, evaluation_dataset: EvaluationDataset, modes: tuple[str, ...] = ()) -> Evaluation:
        """Evaluate the network as it is now; every process must call it."""
        metadata = self.trainer.product.metadata
        with self.trainer.whole() as network, matrix_products("highest"):  # the precision of `acgpt evaluate`
            engine = Engine(network, bos=metadata.bos_token_id or 0, mask=metadata.mask_token_id)
            return evaluate(self.method, engine, evaluation_dataset, modes=modes, progress=self.bar.evaluated)

    def close(self) -> None:
        """Stop the bar and close the board."""
        self.bar.stop()
        if self.board is not None:
            self.board.close()
            self.board = None
