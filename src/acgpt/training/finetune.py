"""Fine-tuning: give a pretrained model the ability to condition on the future.

A recipe says how, as in training from scratch; the arguments of `finetune` are short for the keys that most people set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acgpt.common.options import keywords, separated
from acgpt.errors import InputError
from acgpt.training.options import FinetuningOptions
from acgpt.training.recipe import Recipe, load_recipe

LORA, FULL = "finetune-lora", "finetune-full"  # the recipes taken where none is named


@keywords(FinetuningOptions)
def finetune(
    base: str | Path | None = None,
    corpus: str | Path | None = None,
    output: str | Path | None = None,
    *,
    recipe: str | Path | None = None,
    **changes: Any,
) -> dict[str, Any] | None:
    """Teach a pretrained model to condition on the future, through a LoRA adapter or in all its weights.

        acgpt.finetune("Qwen/Qwen3-1.7B", "data/mine", "runs/mine", steps=500)
        lm = acgpt.load("Qwen/Qwen3-1.7B", adapter="runs/mine/adapter")

    Args:
        **keywords: See `FinetuningOptions`.
        recipe: A YAML file, or the name of a recipe that comes with acgpt. Default: finetune-lora; with `full`,
            finetune-full.
        **changes: Keys of the recipe and their values, as in `acgpt.train`.

    Returns:
        As `acgpt.train`: the contents of `results.json`, or `None` if the run was stopped before its end.
    """
    from acgpt.training.train import train  # torch and transformers, seconds to import

    options, others = separated(FinetuningOptions, changes | {"base": base, "corpus": corpus, "output": output})
    others |= {key: changes[key] for key in ("steps", "lr") if key in changes}  # None too: steps=None, epochs=3
    chosen = finetuning_recipe(recipe, options, others)
    return train(chosen, resume=options.resume, quiet=options.quiet, minutes=options.minutes)


def finetuning_recipe(recipe: str | Path | None, options: FinetuningOptions, changes: Mapping[str, Any]) -> Recipe:
    """The recipe that the arguments of `finetune` come to; `changes` have the last word."""
    full = options.full
    if full and (options.rank is not None or options.four_bits):
        raise InputError(
            "`full` trains all weights, and `rank` and `four_bits` are for adapters: leave one or the other out."
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
        raise InputError(f"the recipe {name} begins from nothing: name a model with `base`, or train from scratch.")
    return loaded
