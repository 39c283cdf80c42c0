"""Hugging Face's Trainer, with our batches, loss, optimizer and checkpoints.

The Trainer brings the loop, accumulation, clipping, DDP and FSDP. A step's loss is the mean over all asked tokens of
the whole step, over every process and every accumulated batch, whatever share of them a batch has.

A checkpoint is written aside and gets its name when all of it is on the disk. It is a Hugging Face folder (weights in
fp32, tokenizer, acgpt.json) with the state of optimizer, schedule and random numbers beside it; these three are torch
files, which are read back with `weights_only=True`: no code in them is run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from acgpt.errors import InputError
from acgpt.training.batches import Batch, Batches
from acgpt.training.learner import Learner, flops
from acgpt.training.networks import Tuned
from acgpt.training.run_folder import CHECKPOINT, CHECKPOINTS, PARTIAL, checkpoints, commit, discard, step_of, writing

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINED = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)
PREFETCH = 4  # batches that a worker prepares ahead


@dataclass
class Watch:
    """What this process has done since the last row of the log."""

    steps: int = 0
    waited: float = 0.0  # seconds, for data
    flops: float = 0.0
    since: float = field(default_factory=time.perf_counter)


class AcTrainer(Trainer):
    """The Hugging Face Trainer of a run.

    Args:
        learner: The network and its loss.
        batches: The training batches.
        args: Arguments of the Hugging Face Trainer.
        product: What is trained, and how checkpoints and the final model are written.
        fsdp: Whether each process holds a shard of the network.
        keep: Number of checkpoints to keep.
        workers: Number of processes that prepare batches.
        optimizer: Makes the optimizer of a network.
        schedule: Learning rate of a step, from 0, as a share of its peak.
    """

    def __init__(
        self,
        learner: Learner,
        batches: Batches,
        args: TrainingArguments,
        *,
        product: Tuned,
        fsdp: bool,
        keep: int,
        workers: int,
        optimizer: Callable[[PreTrainedModel], torch.optim.Optimizer],
        schedule: Callable[[int], float],
    ) -> None:
        self.product, self.fsdp, self.keep, self.workers = product, fsdp, keep, min(workers, cores())
        self.make_optimizer, self.schedule = optimizer, schedule
        self.is_fsdp_enabled: bool  # the Trainer's own
        self.optimizer: Any
        self.watch, self.closing = Watch(), multiprocessing.Event()
        self.batches, self.first = batches, 0  # number of the next batch
        super().__init__(model=learner, args=args, train_dataset=batches)
        self.model_accepts_loss_kwargs = True  # the loss is normalised by the step's tokens, not by its batches
        self.loss_is_scaled_for_ga = True
        self.remove_callback(PrinterCallback)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; with FSDP on CPUs too, which Accelerate leaves out and torch has."""
        super().create_accelerator_and_postprocess()
        if self.fsdp and not self.is_fsdp_enabled:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**(self.args.fsdp_plugin_args or {}))
            if state.mixed_precision != "no":
                state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
            state.distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled:
            # Whole weights and states in a checkpoint, whatever the number of processes; files of shares would be
            # read with pickle, besides.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")

    @property
    def network(self) -> PreTrainedModel:
        """The language model inside."""
        return self.accelerator.unwrap_model(self.model).model

    # ---- a step -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches in their order; process p of n gets every n-th, from the p-th."""
        loader = DataLoader(
            self.batches,
            sampler=Remaining(len(self.batches), self.first),
            collate_fn=only,
            num_workers=self.workers,
            worker_init_fn=partial(follow, self.closing),
            prefetch_factor=PREFETCH if self.workers else None,
            pin_memory=self.args.device.type == "cuda",
            generator=torch.Generator(),  # its draws for the workers are not taken from those of dropout
        )
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Return the batches of one step, and the number of tokens that all processes predict in it."""
        start = time.perf_counter()
        inputs = [next(epoch_iterator) for _ in range(num_batches)]
        self.watch.waited += time.perf_counter() - start
        batches: list[Batch] = [each["batch"] for each in inputs]
        counts = {name: sum(getattr(batch, name) for batch in batches) for name in ("slots", "pairs", "asked")}
        self.watch.flops += flops(self.network, **counts)
        self.watch.steps += 1
        asked = torch.tensor(counts["asked"], device=device, dtype=torch.float32)
        return inputs, self.accelerator.reduce(asked, "sum") if self.args.world_size > 1 else asked

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This batch's part of the step's loss, times the processes, over which gradients are averaged."""
        loss: Tensor = model(**inputs) * (self.args.world_size / num_items_in_batch)
        return loss

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer."""
        self.optimizer = self.make_optimizer(self.network)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the scheduler of the learning rate."""
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.schedule)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir) / PARTIAL)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder, name = Path(self.args.output_dir), f"{CHECKPOINT}{self.state.global_step}"
        partial, final = folder / PARTIAL, folder / CHECKPOINTS / name
        with writing(final):
            try:
                if self.args.should_save:
                    discard(partial)
                    (partial / name).mkdir(parents=True)
                self.accelerator.wait_for_everyone()
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    commit(partial / name, final)
                    for old in checkpoints(folder)[: -self.keep]:
                        discard(old)
            finally:
                if self.args.should_save:
                    discard(partial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what is trained as it is now, with the tokenizer and acgpt.json; every process must call it."""
        weights = self.weights()
        if self.args.should_save:
            self.product.write(weights, Path(output_dir or self.args.output_dir))

    def weights(self) -> dict[str, Tensor]:
        """All weights that are trained, those that are tied once; every process must call it."""
        held: Any = get_model_state_dict(self.model, options=TRAINED) if self.fsdp else self.model.state_dict()
        network = {name.removeprefix("model."): weight for name, weight in held.items()}
        return {name: weight for name, weight in network.items() if name in self.product.kept}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer.optimizer  # accelerate has wrapped it
        state = get_optimizer_state_dict(self.model, optimizer, options=WHOLE) if self.fsdp else optimizer.state_dict()
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def resume(self, checkpoint: Path | None) -> None:
        """Train; from a checkpoint, if there is one."""
        if checkpoint is not None:
            self.first = (step_of(checkpoint) or 0) * self.batches.parts
        try:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except (pickle.UnpicklingError, SafetensorError) as error:
            words = str(error).partition("\n")[0]
            raise InputError(
                f"{checkpoint} is damaged, or not a checkpoint of this program: {words} Delete it, and resume from the "
                "one before it."
            ) from error
        finally:
            self.closing.set()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        weights = self.product.read(Path(resume_from_checkpoint))
        if self.fsdp:
            outer: dict[str, Any] = {f"model.{name}": weight for name, weight in weights.items()}
            set_model_state_dict(self.model, outer, options=TRAINED)
        else:
            self.product.load(weights)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state, schedule = (
            torch.load(Path(checkpoint) / name, map_location="cpu", weights_only=True)
            for name in (OPTIMIZER, SCHEDULER)
        )
        if self.fsdp:
            set_optimizer_state_dict(self.model, self.optimizer.optimizer, state, options=WHOLE)
        else:
            self.optimizer.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(schedule)

    # ---- the network as a whole -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """The network, to be called by itself; within, it is as `export` would write it.

        Where FSDP has shared it out, its blocks gather themselves one by one, and what stands around them is gathered
        here: all processes must call it alike. And it predicts tokens of the tokenizer only: in training the vocabulary
        is padded.
        """
        outermost = self.model if isinstance(self.model, FSDPModule) else None
        if outermost is not None:
            outermost.unshard()
        network, size = self.network, self.product.vocabulary
        hook = network.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits[..., :size])
        try:
            yield network
        finally:
            hook.remove()
            if outermost is not None:
                outermost.reshard()

    @torch.no_grad()
    def round(self) -> None:
        """Make what was trained what `export` will write, to the last bit."""
        for name, weight in self.network.named_parameters():
            if name in self.product.kept:
                weight.copy_(weight.to(self.product.dtype))

    def export(self, folder: Path) -> int | None:
        """Write what was trained, a plain Hugging Face model or a PEFT adapter.

        Returns:
            How many parameters it has; `None` on processes that do not write.
        """
        weights = self.weights()
        if not self.args.should_save:
            return None
        partial = folder.with_name(f".{folder.name}")
        with writing(folder):
            try:
                parameters = self.product.export(weights, partial)
                commit(partial, folder)
            finally:
                discard(partial)
        return parameters


class Remaining(Sampler[int]):
    """The numbers of the batches from the first that is still to be read.

    Its length is that of the whole run, by which the Trainer counts.
    """

    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.count))

    def __len__(self) -> int:
        return self.count


def only(items: list[Batch]) -> dict[str, Batch]:
    """Collate: an item of the dataset is a whole batch. The Trainer wants the arguments of `Learner.forward`."""
    (batch,) = items
    return {"batch": batch}


def cores() -> int:
    """How many this process may use: more workers than that would only be in each other's way."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def follow(closing: Any, worker: int) -> None:
    """Make a worker end with the main process, and silently.

    Ctrl-C and a scheduler's SIGTERM reach both, and are for the main process to handle, which may want to go on to a
    checkpoint. Its own SIGTERM, in the end, comes after `closing` is set.
    """

    def terminate(number: int, where: Any) -> None:
        if closing.is_set():
            os._exit(0)

    def excepthook(kind: type[BaseException], error: BaseException, where: Any) -> None:
        if not issubclass(kind, ConnectionError | EOFError):  # it has gone while a batch was on its way
            sys.__excepthook__(kind, error, where)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, terminate)
    sys.excepthook = excepthook
