"""`acgpt finetune`: fine-tune a pretrained model to condition on the future."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.train import ChangesArgument, ListOption, print_recipes, train_and_report
from acgpt.cli.ui import ObjectOption, with_options
from acgpt.training.options import FinetuningOptions

RECIPE = "YAML file, or name of a built-in recipe (see --list). Default: finetune-lora; with --full, finetune-full."


@with_options(FinetuningOptions)
def finetune(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", show_default=False, help=RECIPE)] = None,
    changes: ChangesArgument = None,
    *,
    options: FinetuningOptions,
    list_recipes: ListOption = False,
    as_json: ObjectOption = False,
) -> None:
    r"""Fine-tune a pretrained model to condition on the future.

    acgpt prepare mine.jsonl -t Qwen/Qwen3-1.7B --validation 0.01 -o data/mine
    acgpt finetune -b Qwen/Qwen3-1.7B -c data/mine -o runs/mine
    acgpt finetune -b Qwen/Qwen3-1.7B -c data/mine -o runs/twin --causal
    acgpt finetune qwen3-8b-lora --mix 0.3 output=runs/qwen3-mixed
    acgpt finetune -b default -c data/mine -o runs/full --full --steps 500
    torchrun --nproc-per-node 4 -m acgpt finetune llama-3.1-8b-full

    Writes a run folder as acgpt train does, with a PEFT adapter (folder adapter)
    or, with --full, a model (folder model). To use the adapter in Python:
    acgpt.load(BASE, adapter="runs/mine/adapter"). Options are shorthands for
    recipe keys; see docs/how-to/adapt.md for how to choose them.

    Keys of --json: those of acgpt train.
    """
    from acgpt.training.finetune import finetuning_recipe
    from acgpt.training.recipe import read_change, recipes_for

    if list_recipes:
        print_recipes(recipes_for(finetuning=True), as_json)
        return
    changes = list(changes or ())
    if recipe is not None and "=" in recipe and not Path(recipe).is_file():
        changes, recipe = [recipe, *changes], None
    changed = dict(map(read_change, changes))
    train_and_report(lambda: finetuning_recipe(recipe, options, changed), options, as_json)
