"""What a recipe leaves to the machine: device, precision, attention, compilation, and how a step is divided.

`settle` decides it, or says why a recipe cannot be trained here; `arguments` tells the Trainer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from acgpt.errors import InputError
from acgpt.training.learner import choose_attention
from acgpt.training.recipe import MUON_AND_FSDP, Recipe


@dataclass(frozen=True)
class Plan:
    """What a recipe comes to on this machine.

    Args:
        device: "cuda", "mps" or "cpu".
        half: Mixed precision with bf16.
        attention: The backend of a training step, see `learner.choose_attention`.
        compiled: Is the step put through torch.compile?
        processes: How many train together.
        local: Which of those on this machine this one is.
        fsdp: Has each a share of the network, rather than all of it?
        launched: FSDP is configured by accelerate's launcher.
        steps: Optimizer steps.
        micro_batch: Texts in a forward pass.
        accumulation: Forward passes of a process in a step.
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
    def place(self) -> str:
        """The device of this process."""
        return f"{self.device}:{self.local}" if self.device == "cuda" and self.processes > 1 else self.device

    @property
    def parts(self) -> int:
        """Forward passes in a step, of all processes."""
        return self.accumulation * self.processes


def settle(
    recipe: Recipe, texts: int, environment: Mapping[str, str] = os.environ, *, head_dim: int | None = None
) -> Plan:
    """Decide what a recipe leaves open.

    Args:
        recipe: The recipe.
        texts: How many texts the corpus has.
        environment: Where torchrun and accelerate say what they have started.
        head_dim: The width of an attention head; by default that of the recipe's own shape.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = next(name for name in there if there[name]) if recipe.device == "auto" else recipe.device
    if not there[device]:
        raise InputError(f"device={recipe.device}, and there is none here: use device=auto or device=cpu.")
    half = recipe.precision == "bf16" or (recipe.precision == "auto" and device == "cuda")
    if half and device == "mps":
        raise InputError("precision=bf16 is for CUDA and CPUs: use precision=fp32 on mps.")
    head_dim = head_dim or recipe.shape.width // recipe.shape.heads
    attention = choose_attention(device, half=half, dropout=recipe.attention_dropout, head_dim=head_dim)
    processes = int(environment.get("WORLD_SIZE", 1))
    launched = environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    fsdp = launched or recipe.parallel == "fsdp"
    if fsdp and processes == 1:
        raise InputError("FSDP is for several processes: start them with torchrun --nproc-per-node N -m acgpt train ….")
    if launched and environment.get("FSDP_VERSION", "1") != "2":
        raise InputError("FSDP of version 2 is needed: say fsdp_version: 2 in accelerate's configuration.")
    if fsdp and recipe.optimizer == "muon":
        raise InputError(MUON_AND_FSDP)
    if recipe.compile is True and (attention == "dense" or fsdp):
        raise InputError("compile=true needs CUDA, bf16, attention_dropout=0 and no FSDP: leave compile out.")
    if recipe.compile is True and recipe.checkpointing:
        raise InputError("compile=true does not go with checkpointing=true: leave one of them out.")
    if recipe.quantize and (fsdp or device != "cuda"):  # on a CPU bitsandbytes repacks weights so that none can learn
        raise InputError("quantize=4bit is for CUDA, and such weights cannot be shared out: leave it or FSDP out.")
    eager = attention == "dense" or fsdp or recipe.checkpointing or recipe.quantize is not None
    compiled = recipe.compile is True or (recipe.compile == "auto" and not eager)
    if recipe.batch % processes:
        raise InputError(f"batch ({recipe.batch}) must be a multiple of the number of processes ({processes}).")
    share = recipe.batch // processes
    largest = min(share, recipe.micro_batch or share)
    if device == "cpu" and recipe.base:
        largest = 1  # a CPU gains nothing from more, and a large vocabulary takes its memory
    micro_batch = next(size for size in range(largest, 0, -1) if share % size == 0)
    steps = recipe.steps or max(1, round((recipe.epochs or 0) * texts / recipe.batch))
    if recipe.warmup >= steps:
        raise InputError(
            f"warmup ({recipe.warmup}) must be shorter than the run ({steps} steps): say warmup={steps // 10}."
        )
    local, accumulation = int(environment.get("LOCAL_RANK", 0)), share // micro_batch
    launched = launched and recipe.parallel != "fsdp"
    return Plan(device, half, attention, compiled, processes, local, fsdp, launched, steps, micro_batch, accumulation)


def arguments(
    plan: Plan,
    *,
    output: str | Path,
    seed: int,
    lr: float,
    clip: float,
    log_every: int,
    save_every: int,
    layers: Iterable[str] = ("GPTNeoXLayer",),
) -> TrainingArguments:
    """Return the arguments of the Hugging Face Trainer.

    Args:
        plan: What the recipe comes to on this machine.
        output: Folder of the run.
        seed: Seed of the run.
        lr: Peak learning rate.
        clip: Maximum norm of a gradient.
        log_every: Steps between two rows of the log.
        save_every: Steps between two checkpoints.
        layers: Class names of the network's blocks, which FSDP shards one by one.
    """
    fsdp: dict[str, Any] = {}
    if plan.fsdp and not plan.launched:
        fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": sorted(layers)}}
    elif plan.fsdp:
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(sorted(layers))  # whatever it was told of the network
    args = TrainingArguments(
        output_dir=str(output),
        max_steps=plan.steps,
        per_device_train_batch_size=1,  # the dataset's items are whole batches
        gradient_accumulation_steps=plan.accumulation,
        learning_rate=lr,
        max_grad_norm=clip,
        bf16=plan.half,
        use_cpu=plan.device == "cpu",
        seed=seed,
        logging_steps=log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        log_level="error",
        log_level_replica="error",
        save_strategy="steps",
        save_steps=save_every,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        ignore_data_skip=True,  # on resuming: the trainer sees to it
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=plan.device == "cuda",
        accelerator_config={"non_blocking": plan.device == "cuda"},
        **fsdp,
    )
    args.mixed_precision = "bf16" if plan.half else "no"  # whatever accelerate was launched with
    args._n_gpu = min(1, args.n_gpu)  # one process, one device: several GPUs are for torchrun
    return args
