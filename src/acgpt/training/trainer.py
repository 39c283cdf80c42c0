"""The Hugging Face Trainer with acgpt's batches, loss, optimizer and checkpoints.

The Trainer provides the loop, gradient accumulation, clipping, DDP and FSDP. The loss of a step is the mean over all
asked tokens of the step, over every process and every accumulated batch, however many of them a batch has.

A checkpoint is written to a temporary folder and renamed when it is complete on disk. It is a Hugging Face folder
(weights in fp32, tokenizer, acgpt.json) with the states of the optimizer, the schedule and the random numbers. These
three are torch files that are loaded with `weights_only=True`, so no code in them is run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
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
from acgpt.training.learner import Learner, Work
from acgpt.training.networks import HEAD, Tuned
from acgpt.training.optimizer import build_optimizer, rate
from acgpt.training.recipe import Recipe
from acgpt.training.run_folder import CHECKPOINT, CHECKPOINTS, PARTIAL, checkpoints, commit, discard, step_of, writing

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINED = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)
PREFETCH = 4  # batches that a worker prepares in advance


@dataclass
class Watch:
    """Measurements of this process since the last row of the log."""

    steps: int = 0
    waited: float = 0.0  # seconds spent waiting for data
    flops: float = 0.0
    since: float = field(default_factory=time.perf_counter)


class AcTrainer(Trainer):
    """The Hugging Face Trainer of a run.

    Args:
        learner: The network and its loss.
        batches: The training batches.
        args: Arguments of the Hugging Face Trainer.
        product: What is trained, and how checkpoints and the final model are written.
        recipe: The recipe.
        fsdp: Whether each process holds a shard of the network.
    """

    def __init__(
        self,
        learner: Learner,
        batches: Batches,
        args: TrainingArguments,
        *,
        product: Tuned,
        recipe: Recipe,
        fsdp: bool,
    ) -> None:
        self.product, self.recipe, self.fsdp, self.workers = product, recipe, fsdp, min(recipe.workers, cores())
        self.is_fsdp_enabled: bool  # an attribute of the Trainer
        self.optimizer: Any
        self.watch, self.closing = Watch(), multiprocessing.Event()
        self.batches, self.first = batches, 0  # number of the next batch
        super().__init__(model=learner, args=args, train_dataset=batches)
        self.model_accepts_loss_kwargs = True  # the loss is normalised by the step's tokens, not by its batches
        self.loss_is_scaled_for_ga = True
        self.remove_callback(PrinterCallback)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator. Enable FSDP on CPUs too, which torch supports but Accelerate does not."""
        super().create_accelerator_and_postprocess()
        if self.fsdp and not self.is_fsdp_enabled:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**(self.args.fsdp_plugin_args or {}))
            if state.mixed_precision != "no":
                state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
            state.distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled:
            # A checkpoint holds whole weights and states, for any number of processes. Sharded files would be loaded
            # with pickle.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")

    @property
    def network(self) -> PreTrainedModel:
        """The language model."""
        return self.accelerator.unwrap_model(self.model).model

    @cached_property
    def work(self) -> Work:
        """What the network computes per slot, pair and asked token."""
        return Work.of(self.network)

    def restart_watch(self) -> Watch:
        """Return what this process has done since the last call, and start anew."""
        watch, self.watch = self.watch, Watch()
        return watch

    # ---- a step -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the data loader of the batches in order; process p of n gets every n-th batch, from the p-th."""
        loader = DataLoader(
            self.batches,
            sampler=Remaining(len(self.batches), self.first),
            collate_fn=collate,
            num_workers=self.workers,
            worker_init_fn=partial(initialize_worker, self.closing),
            prefetch_factor=PREFETCH if self.workers else None,
            pin_memory=self.args.device.type == "cuda",
            generator=torch.Generator(),  # its own, so that seeding the workers does not change dropout
        )
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Return the batches of one step, and the weight of all that all processes predict in it."""
        start = time.perf_counter()
        inputs = [next(epoch_iterator) for _ in range(num_batches)]
        self.watch.waited += time.perf_counter() - start
        batches: list[Batch] = [item["batch"] for item in inputs]
        counts = {name: sum(getattr(batch, name) for batch in batches) for name in ("slots", "pairs", "asked")}
        self.watch.flops += self.work.total(**counts)
        self.watch.steps += 1
        # Not torch.tensor, which waits for the device.
        weight = torch.full((), sum(batch.weight for batch in batches), device=device, dtype=torch.float32)
        weight = self.accelerator.reduce(weight, "sum") if self.args.world_size > 1 else weight
        return inputs, weight.clamp(min=1)  # a step may predict nothing

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the batch's part of the step's loss, times the number of processes, which average their gradients."""
        loss: Tensor = model(**inputs) * (self.args.world_size / num_items_in_batch)
        return loss

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer."""
        recipe, length_head = self.recipe, self.accelerator.unwrap_model(self.model).length_head
        self.optimizer = build_optimizer(
            self.network, length_head, muon=recipe.optimizer == "muon", lr=recipe.lr, muon_lr=recipe.muon_lr or 0.0,
            betas=recipe.betas, weight_decay=recipe.weight_decay,
        )  # fmt: skip
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the learning rate scheduler."""
        recipe = self.recipe
        schedule = partial(
            rate, steps=num_training_steps, warmup=recipe.warmup, shape=recipe.schedule, final=recipe.final_lr or 0.0,
            cooldown=recipe.cooldown or 1.0,
        )  # fmt: skip
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, schedule)
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
                    for old in checkpoints(folder)[: -self.recipe.keep]:
                        discard(old)
            finally:
                if self.args.should_save:
                    discard(partial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the current weights with the tokenizer and acgpt.json; every process must call it."""
        weights = self.weights()
        if self.args.should_save:
            self.product.write(weights, Path(output_dir or self.args.output_dir))

    def weights(self) -> dict[str, Tensor]:
        """Return all trained weights, tied weights once; every process must call it."""
        state: Any = get_model_state_dict(self.model, options=TRAINED) if self.fsdp else self.model.state_dict()
        network = {name.removeprefix("model."): weight for name, weight in state.items()}
        return {name: weight for name, weight in network.items() if name in self.product.kept}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer.optimizer  # inside Accelerate's wrapper
        state = get_optimizer_state_dict(self.model, optimizer, options=WHOLE) if self.fsdp else optimizer.state_dict()
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def resume(self, checkpoint: Path | None) -> None:
        """Train, from a checkpoint if one is given."""
        if checkpoint is not None:
            self.first = (step_of(checkpoint) or 0) * self.batches.parts
        try:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except (pickle.UnpicklingError, SafetensorError) as error:
            message = str(error).partition("\n")[0]
            raise InputError(
                f"{checkpoint} is damaged, or not a checkpoint of acgpt: {message} Delete it, and resume from the "
                "previous one."
            ) from error
        finally:
            self.closing.set()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        weights = self.product.read(Path(resume_from_checkpoint))
        if self.fsdp:
            prefixed: dict[str, Any] = {
                name if name.startswith(HEAD) else f"model.{name}": weight for name, weight in weights.items()
            }
            set_model_state_dict(self.model, prefixed, options=TRAINED)
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
        """Yield the network for direct calls, with the outputs of the model that `export` would write.

        With FSDP, the blocks gather their weights one by one, and the other weights are gathered here: all processes
        must call it in the same way. The network predicts only tokens of the tokenizer, without the padding that the
        vocabulary has in training.
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
        """Round the trained weights to the data type of `export`, so that the written model is identical."""
        for name, weight in self.network.named_parameters():
            if name in self.product.kept:
                weight.copy_(weight.to(self.product.dtype))

    def export(self, folder: Path) -> int | None:
        """Write the final model, as a plain Hugging Face model or a PEFT adapter.

        Returns:
            Number of parameters; `None` on processes that do not write.
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
    """A sampler of the numbers of the remaining batches.

    Its length is that of the whole run, as the Trainer expects.
    """

    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.count))

    def __len__(self) -> int:
        return self.count


def collate(items: list[Batch]) -> dict[str, Batch]:
    """Collate one item, which is a whole batch, into the keyword arguments of `Learner.forward`."""
    (batch,) = items
    return {"batch": batch}


def cores() -> int:
    """Return the number of cores that this process may use; more workers would only slow each other down."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def initialize_worker(closing: Any, worker: int) -> None:
    """Set up a worker to end silently with the main process.

    Ctrl-C and a scheduler's SIGTERM reach both, but only the main process handles them, because it may continue up to
    a checkpoint. The SIGTERM by which it ends its workers comes after `closing` is set.
    """

    def terminate(number: int, frame: Any) -> None:
        if closing.is_set():
            os._exit(0)

    def excepthook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if not issubclass(kind, ConnectionError | EOFError):  # the main process ended while a batch was sent
            sys.__excepthook__(kind, error, traceback)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, terminate)
    sys.excepthook = excepthook
