"""The state of a run on all processes, and its checkpoints: weights, optimizer and random numbers.

A checkpoint is written to a temporary folder and renamed when it is complete on disk. It is a Hugging Face folder
(weights in fp32, tokenizer, acgpt.json) with the states of the optimizer and of each process's random numbers. These
are torch files that are loaded with `weights_only=True`, so no code in them is run. They hold whole weights and states,
for any number of processes.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from acgpt.errors import InputError
from acgpt.training.learner import Learner
from acgpt.training.networks import HEAD, Tuned
from acgpt.training.run_folder import CHECKPOINT, CHECKPOINTS, PARTIAL, checkpoints, commit, discard, writing

OPTIMIZER = "optimizer.pt"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINED = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


class State:
    """What a run changes: a network and its optimizer, as Accelerate has wrapped them.

    With FSDP each process has a shard of them. All processes must call a method together.

    Args:
        accelerator: Wraps the network and the optimizer.
        learner: The network and its loss.
        optimizer: The optimizer of its weights.
        product: What is trained, and how checkpoints and the final model are written.

    Attributes:
        model: The learner, wrapped.
        optimizer: The optimizer; its parameters are those of the wrapped network.
    """

    def __init__(
        self, accelerator: Accelerator, learner: Learner, optimizer: torch.optim.Optimizer, product: Tuned
    ) -> None:
        self.accelerator, self.product, self.main = accelerator, product, accelerator.is_main_process
        self.model, wrapped = accelerator.prepare(learner, optimizer)
        self.optimizer: torch.optim.Optimizer = wrapped.optimizer
        self.sharded = isinstance(self.model, FSDPModule)

    @property
    def learner(self) -> Any:
        """The network and its loss."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def network(self) -> PreTrainedModel:
        """The language model."""
        network: PreTrainedModel = self.learner.model
        return network

    def weights(self) -> dict[str, Tensor]:
        """Return all trained weights, tied weights once."""
        state: dict[str, Any] = (
            get_model_state_dict(self.model, options=TRAINED) if self.sharded else self.learner.state_dict()
        )
        network = {name.removeprefix("model."): weight for name, weight in state.items()}
        return {name: weight for name, weight in network.items() if name in self.product.kept}

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: Path, step: int, keep: int) -> None:
        """Write the checkpoint of a step to the folder of a run, and delete old ones.

        Args:
            folder: Folder of the run.
            step: Number of steps done.
            keep: Number of checkpoints to keep.
        """
        partial, final = folder / PARTIAL, folder / CHECKPOINTS / f"{CHECKPOINT}{step}"
        with writing(final):
            try:
                if self.main:
                    discard(partial)
                    partial.mkdir(parents=True)
                self.accelerator.wait_for_everyone()
                weights, optimizer = self.weights(), self.optimizer
                state = (
                    get_optimizer_state_dict(self.model, optimizer, options=WHOLE)
                    if self.sharded
                    else optimizer.state_dict()
                )
                if self.main:
                    self.product.write(weights, partial)
                    torch.save(state, partial / OPTIMIZER)
                torch.save(random_state(), partial / self.random_file)
                self.accelerator.wait_for_everyone()
                if self.main:
                    commit(partial, final)
                    for old in checkpoints(folder)[:-keep]:
                        discard(old)
            finally:
                if self.main:
                    discard(partial)

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint.

        Raises:
            InputError: It is damaged.
        """
        try:
            state = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True)
            numbers = checkpoint / self.random_file  # missing if there were fewer processes
            random_numbers = torch.load(numbers, weights_only=True) if numbers.exists() else None
            weights = self.product.read(checkpoint)
            if set(weights) != self.product.kept:
                raise SafetensorError("its weights are not those of this network.")
        except (pickle.UnpicklingError, SafetensorError, OSError, EOFError, RuntimeError, ValueError) as error:
            message = str(error).partition("\n")[0] or "a file is cut off"
            raise InputError(
                f"{checkpoint} is damaged, or not a checkpoint of acgpt: {message.rstrip('.')}. Delete it, and resume "
                "from the previous one."
            ) from error
        self.load_weights(weights)
        if self.sharded:
            set_optimizer_state_dict(self.model, self.optimizer, state, options=WHOLE)
        else:
            self.optimizer.load_state_dict(state)
        if random_numbers is not None:
            set_random_state(random_numbers)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load all trained weights."""
        if not self.sharded:
            return self.product.load(weights)
        prefixed: dict[str, Any] = {
            name if name.startswith(HEAD) else f"model.{name}": weight for name, weight in weights.items()
        }
        set_model_state_dict(self.model, prefixed, options=TRAINED)

    @property
    def random_file(self) -> str:
        """Name of the file with the random numbers of this process."""
        alone = self.accelerator.num_processes == 1
        return "rng_state.pth" if alone else f"rng_state_{self.accelerator.process_index}.pth"

    # ---- the network as a whole -------------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """Yield the network for direct calls, with the outputs of the model that `export` would write.

        With FSDP, the blocks gather their weights one by one, and the other weights are gathered here. The network
        predicts only tokens of the tokenizer, without the padding that the vocabulary has in training.
        """
        if self.sharded:
            self.model.unshard()
        network, size = self.network, self.product.vocabulary
        hook = network.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits[..., :size])
        try:
            yield network
        finally:
            hook.remove()
            if self.sharded:
                self.model.reshard()

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
        if not self.main:
            return None
        partial = folder.with_name(f".{folder.name}")
        with writing(folder):
            try:
                parameters = self.product.export(weights, partial)
                commit(partial, folder)
            finally:
                discard(partial)
        return parameters


def random_state() -> dict[str, Any]:
    """Return the state of the random numbers of this process."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "cpu": torch.random.get_rng_state(),
        "cuda": torch.cuda.random.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the random numbers of this process to a result of `random_state`."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.random.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.random.set_rng_state(state["cuda"])
