"""Fine-tuning: give a pretrained model the ability to condition on the future.

A recipe holds all settings, as in training from scratch; the arguments of `finetune` are shortcuts for its main keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acgpt.common.options import keywords, split_keywords
from acgpt.errors import InputError
from acgpt.training.options import FinetuningOptions
from acgpt.training.recipe import Recipe, load_recipe

LORA, FULL = "finetune-lora", "finetune-full"  # the default recipes


@keywords(FinetuningOptions)
def finetune(
    base: str | Path | None = None,
    corpus: str | Path | None = None,
    output: str | Path | None = None,
    *,
    recipe: str | Path | None = None,
    **changes: Any,
) -> dict[str, Any] | None:
    """Fine-tune a pretrained model to condition on the future, with a LoRA adapter or in all its weights.

        acgpt.finetune("Qwen/Qwen3-1.7B", "data/mine", "runs/mine", steps=500)
        lm = acgpt.load("Qwen/Qwen3-1.7B", adapter="runs/mine/adapter")

    Args:
        **keywords: See `FinetuningOptions`.
        recipe: A YAML file, or the name of a recipe that comes with acgpt. Default: finetune-lora; with `full`,
            finetune-full.
        **changes: Keys of the recipe and their values, as in `acgpt.train`.

    Returns:
        The contents of `results.json`, or `None` if the run was stopped before its end, as in `acgpt.train`.
    """
    from acgpt.training.train import train  # imports torch and transformers, which takes seconds

    options, others = split_keywords(FinetuningOptions, changes | {"base": base, "corpus": corpus, "output": output})
    others |= {key: changes[key] for key in ("steps", "lr") if key in changes}  # None too: steps=None, epochs=3
    settings = finetuning_recipe(recipe, options, others)
    return train(settings, resume=options.resume, quiet=options.quiet, minutes=options.minutes)


def finetuning_recipe(recipe: str | Path | None, options: FinetuningOptions, changes: Mapping[str, Any]) -> Recipe:
    """Make the recipe from the arguments of `finetune`; `changes` take precedence over `options`."""
    full = options.full
    if full and (options.rank is not None or options.four_bits):
        raise InputError(
            "`full` trains all weights, but `rank` and `four_bits` are for adapters: leave `full` or the others out."
        )
    name = recipe or (FULL if full else LORA)
    settings = {
        **{key: getattr(options, key) for key in ("base", "corpus", "output", "steps", "lr")},
        "conditioning.r_max": options.r_max,
        "conditioning.empty": options.mix,
        "conditioning.infilling": options.infilling,
        "quantize": "4bit" if options.four_bits else None,
        "method": "gpt" if options.causal else None,
        "lora.rank": options.rank,
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    loaded = load_recipe(name, {**settings, **({"lora": None} if full else {}), **changes})
    if not loaded.base:
        raise InputError(f"the recipe {name} has no pretrained model: choose one with `base`, or use acgpt train.")
    return loaded
