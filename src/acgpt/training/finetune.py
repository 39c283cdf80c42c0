"""Fine-tuning: give a pretrained model the ability to condition on the future.

A recipe says how, as in training from scratch; the arguments of `finetune` are short for the keys that most people set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from acgpt.errors import InputError
from acgpt.training.recipe import Recipe, load_recipe

LORA, FULL = "finetune-lora", "finetune-full"  # the recipes taken where none is named


def finetune(
    base: str | Path | None = None,
    corpus: str | Path | None = None,
    output: str | Path | None = None,
    *,
    recipe: str | Path | None = None,
    rank: int | None = None,
    full: bool = False,
    four_bits: bool = False,
    r_max: float | None = None,
    mix: float | None = None,
    infilling: float | None = None,
    causal: bool = False,
    resume: bool = False,
    quiet: bool = False,
    minutes: float | None = None,
    **changes: Any,
) -> dict[str, Any] | None:
    """Teach a pretrained model to condition on the future, through a LoRA adapter or in all its weights.

        acgpt.finetune("Qwen/Qwen3-1.7B", "data/mine", "runs/mine", steps=500)
        lm = acgpt.load("Qwen/Qwen3-1.7B", adapter="runs/mine/adapter")

    Args:
        base: The model: a folder, a hub id or a .gguf file; "default" is the embedded one.
        corpus: A folder that `acgpt.prepare` has written, with this model's tokenizer.
        output: The run's folder.
        recipe: A YAML file, or the name of a recipe that comes with acgpt. Default: finetune-lora; with `full`,
            finetune-full.
        rank: LoRA's rank; alpha is then twice that.
        full: Train all weights instead of an adapter.
        four_bits: Hold the frozen weights in 4 bits (needs bitsandbytes).
        r_max: The largest share of a text that is given.
        mix: The share of texts that are read left to right with nothing given (autoregressive mixing).
        infilling: The share of texts that ask for one gap, all else given.
        causal: Train the causal twin: the same texts in the same order, nothing given.
        resume: As in `acgpt.train`.
        quiet: As in `acgpt.train`.
        minutes: As in `acgpt.train`.
        **changes: Keys of the recipe and their values, as in `acgpt.train`.

    Returns:
        As `acgpt.train`: the contents of `results.json`, or `None` if the run was stopped before its end.
    """
    from acgpt.training.train import train  # torch and transformers, seconds to import

    chosen = finetuning_recipe(
        recipe, changes, base=base, corpus=corpus, output=output, rank=rank, full=full, four_bits=four_bits,
        r_max=r_max, mix=mix, infilling=infilling, causal=causal,
    )  # fmt: skip
    return train(chosen, resume=resume, quiet=quiet, minutes=minutes)


def finetuning_recipe(
    recipe: str | Path | None,
    changes: dict[str, Any],
    *,
    rank: int | None,
    full: bool,
    four_bits: bool,
    r_max: float | None,
    mix: float | None,
    infilling: float | None,
    causal: bool,
    **named: Any,
) -> Recipe:
    """The recipe that the arguments of `finetune` come to; `changes` have the last word."""
    if full and (rank is not None or four_bits):
        raise InputError("full trains all weights, and rank and 4bit are for adapters: leave one or the other out.")
    name = recipe or (FULL if full else LORA)
    settings = {
        **named, "conditioning.r_max": r_max, "conditioning.empty": mix, "conditioning.infilling": infilling,
        "quantize": "4bit" if four_bits else None, "method": "gpt" if causal else None, "lora.rank": rank,
    }  # fmt: skip
    settings = {key: value for key, value in settings.items() if value is not None}
    loaded = load_recipe(name, {**settings, **({"lora": None} if full else {}), **changes})
    if not loaded.base:
        raise InputError(f"the recipe {name} begins from nothing: name a model with base, or train from scratch.")
    return loaded
