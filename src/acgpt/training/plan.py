"""The plan of a run on this machine: device, precision, attention, compilation, and the division of a step.

`settle` makes the plan of a recipe, or raises an error if this machine cannot train it; `accelerator_for` sets up the
processes that it asks for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)

from acgpt.errors import InputError
from acgpt.training.learner import choose_attention
from acgpt.training.recipe import Recipe

PATIENCE = timedelta(hours=1)  # of a process for the others, one of which may write a checkpoint of many gigabytes


@dataclass(frozen=True)
class Plan:
    """A recipe resolved for this machine.

    Args:
        device: "cuda", "mps" or "cpu".
        half: Whether to train in bf16 mixed precision.
        attention: Attention backend of a training step, see `learner.choose_attention`.
        compiled: Whether to compile the step with torch.compile.
        processes: Number of processes that train together.
        local: Rank of this process on this machine.
        fsdp: Whether each process holds a shard of the network instead of all of it.
        launched: Whether accelerate's launcher configures FSDP.
        steps: Number of optimizer steps.
        micro_batch: Texts per forward pass.
        accumulation: Forward passes of a process per step.
    """

    device: str
    half: bool
    attention: str
    compiled: bool
    processes: int
    local: int
    fsdp: bool
    launched: bool
    steps: int
    micro_batch: int
    accumulation: int

    @property
    def local_device(self) -> str:
        """Device of this process."""
        return f"{self.device}:{self.local}" if self.device == "cuda" and self.processes > 1 else self.device

    @property
    def parts(self) -> int:
        """Forward passes per step, over all processes."""
        return self.accumulation * self.processes


def settle(
    recipe: Recipe, texts: int, environment: Mapping[str, str] = os.environ, *, head_dim: int | None = None
) -> Plan:
    """Make the plan of a recipe on this machine.

    Args:
        recipe: The recipe.
        texts: Number of texts of the corpus.
        environment: Environment variables, with those of torchrun and accelerate.
        head_dim: Width of an attention head. Default: that of the recipe's shape.

    Raises:
        InputError: This machine cannot train the recipe.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = next(name for name in available if available[name]) if recipe.device == "auto" else recipe.device
    if not available[device]:
        raise InputError(f"device={recipe.device} is not available: use device=auto or device=cpu.")
    half = recipe.precision == "bf16" or (recipe.precision == "auto" and device == "cuda")
    head_dim = head_dim or recipe.shape.width // recipe.shape.heads
    attention = choose_attention(device, half=half, dropout=recipe.attention_dropout, head_dim=head_dim)
    processes = int(environment.get("WORLD_SIZE", 1))
    launched = environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    fsdp = launched or recipe.parallel == "fsdp"
    if fsdp and processes == 1:
        raise InputError("FSDP needs several processes: start them with torchrun --nproc-per-node N -m acgpt train ….")
    if launched and environment.get("FSDP_VERSION", "1") != "2":
        raise InputError("FSDP version 2 is required: set fsdp_version: 2 in accelerate's config.")
    if recipe.compile is True and (attention == "dense" or fsdp):
        raise InputError("compile=true needs CUDA, bf16, attention_dropout=0 and no FSDP: leave compile out.")
    if recipe.compile is True and recipe.checkpointing:
        raise InputError("compile=true does not work with checkpointing=true: leave one of them out.")
    if recipe.quantize and (fsdp or device != "cuda"):  # on a CPU bitsandbytes repacks weights, which prevents training
        raise InputError("quantize=4bit needs CUDA and does not work with FSDP: leave it or FSDP out.")
    eager = attention == "dense" or fsdp or recipe.checkpointing or recipe.quantize is not None
    compiled = recipe.compile is True or (recipe.compile == "auto" and not eager)
    if recipe.batch % processes:
        raise InputError(f"batch ({recipe.batch}) must be a multiple of the number of processes ({processes}).")
    share = recipe.batch // processes
    largest = min(share, recipe.micro_batch or share)
    if device == "cpu" and recipe.base:
        largest = 1  # more is no faster on a CPU, and the logits of a large vocabulary fill its memory
    micro_batch = next(size for size in range(largest, 0, -1) if share % size == 0)
    steps = recipe.steps or max(1, round((recipe.epochs or 0) * texts / recipe.batch))
    resolved: dict[str, Any] = {"device": device, "precision": "bf16" if half else "fp32", "steps": steps}
    resolved |= {"parallel": "fsdp" if fsdp else "ddp", "epochs": None}
    replace(recipe, **resolved)  # a recipe checks its values
    local, accumulation = int(environment.get("LOCAL_RANK", 0)), share // micro_batch
    launched = launched and recipe.parallel != "fsdp"
    return Plan(device, half, attention, compiled, processes, local, fsdp, launched, steps, micro_batch, accumulation)


def accelerator_for(plan: Plan, layers: Iterable[str]) -> Accelerator:
    """Return Accelerate's interface to the processes of a run. It replaces that of an earlier run in this process.

    Args:
        plan: What the recipe comes to on this machine.
        layers: Class names of the network's blocks, which FSDP shards one by one.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    names, sharding, precision = sorted(layers), None, "bf16" if plan.half else "no"
    if plan.launched:
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(names)  # overrides accelerate's config
    elif plan.fsdp:
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names
        )
    accelerator = Accelerator(
        mixed_precision=precision, cpu=plan.device == "cpu", fsdp_plugin=sharding,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # the loop divides by a step's tokens
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=False), InitProcessGroupKwargs(timeout=PATIENCE)
        ],
    )  # fmt: skip
    state = accelerator.state
    if plan.fsdp and state.distributed_type != DistributedType.FSDP:  # on CPUs: torch supports it, Accelerate does not
        state.fsdp_plugin, state.distributed_type = sharding or FullyShardedDataParallelPlugin(), DistributedType.FSDP
        if precision != "no":
            state.fsdp_plugin.set_mixed_precision(precision)
    return accelerator
