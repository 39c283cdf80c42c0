"""`acgpt finetune`: give a pretrained model the ability to condition on the future."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.train import (
    ChangesArgument,
    JsonOption,
    ListOption,
    MinutesOption,
    QuietOption,
    ResumeOption,
    print_recipes,
    train_and_report,
)
from acgpt.cli.ui import option

HELP = {
    "recipe": "A YAML file, or the name of a recipe that comes with acgpt (see --list). "
    "Default: finetune-lora; with --full, finetune-full.",
    "base": "The model: a folder, a hub id or a .gguf file; 'default' is the embedded SmolLM2-135M-Instruct.",
    "corpus": "A folder that acgpt prepare has written, with this model's tokenizer.",
    "output": "The run's folder.",
    "rank": "LoRA's rank; alpha is then twice that.",
    "full": "Train all weights instead of an adapter.",
    "quantize": "Hold the frozen weights in 4 bits (needs bitsandbytes).",
    "r_max": "At most this share of a text is given.",
    "mix": "So many texts, as a share, are read left to right with nothing given (autoregressive mixing).",
    "infilling": "So many, as a share, ask for one gap, all else given.",
    "causal": "Train the causal twin: the same texts in the same order, nothing given.",
    "steps": "Optimizer steps.",
    "lr": "The learning rate at its peak.",
}


def finetune(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", show_default=False, help=HELP["recipe"])] = None,
    changes: ChangesArgument = None,
    base: Annotated[str | None, option("--base", "-b", metavar="MODEL", help=HELP["base"])] = None,
    corpus: Annotated[str | None, option("--corpus", "-c", metavar="FOLDER", help=HELP["corpus"])] = None,
    output: Annotated[str | None, option("--output", "-o", metavar="FOLDER", help=HELP["output"])] = None,
    rank: Annotated[int | None, option("--rank", metavar="N", help=HELP["rank"])] = None,
    full: Annotated[bool, option("--full", help=HELP["full"])] = False,
    four_bits: Annotated[bool, option("--4bit", help=HELP["quantize"])] = False,
    r_max: Annotated[float | None, option("--r-max", metavar="X", help=HELP["r_max"])] = None,
    mix: Annotated[float | None, option("--mix", metavar="X", help=HELP["mix"])] = None,
    infilling: Annotated[float | None, option("--infilling", metavar="X", help=HELP["infilling"])] = None,
    causal: Annotated[bool, option("--causal", help=HELP["causal"])] = False,
    steps: Annotated[int | None, option("--steps", metavar="N", help=HELP["steps"])] = None,
    lr: Annotated[float | None, option("--lr", metavar="X", help=HELP["lr"])] = None,
    resume: ResumeOption = False,
    list_recipes: ListOption = False,
    minutes: MinutesOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    r"""Teach a pretrained model to condition on the future.

    acgpt prepare mine.jsonl -t Qwen/Qwen3-1.7B --validation 0.01 -o data/mine
    acgpt finetune -b Qwen/Qwen3-1.7B -c data/mine -o runs/mine
    acgpt finetune -b Qwen/Qwen3-1.7B -c data/mine -o runs/twin --causal
    acgpt finetune qwen3-8b-lora --mix 0.3 output=runs/qwen3-mixed
    acgpt finetune -b default -c data/mine -o runs/full --full --steps 500
    torchrun --nproc-per-node 4 -m acgpt finetune llama-3.1-8b-full

    The run's folder gets what acgpt train writes. What was learnt is a PEFT
    adapter with a card (folder adapter), or with --full a model (folder model):
    acgpt.load(BASE, adapter="runs/mine/adapter"). Options are short for keys of
    the recipe; docs/how-to/adapt.md explains how to choose them.

    Keys of --json: those of acgpt train.
    """
    from acgpt.training.finetune import finetuning_recipe
    from acgpt.training.recipe import built_in, load_recipe, read_change

    if list_recipes:
        print_recipes({name: words for name, words in built_in().items() if load_recipe(name).base}, as_json)
        return
    changes = list(changes or ())
    if recipe is not None and "=" in recipe and not Path(recipe).is_file():
        changes, recipe = [recipe, *changes], None
    named = {"base": base, "corpus": corpus, "output": output, "steps": steps, "lr": lr}
    train_and_report(
        lambda: finetuning_recipe(
            recipe, dict(map(read_change, changes)), rank=rank, full=full, four_bits=four_bits, r_max=r_max, mix=mix,
            infilling=infilling, causal=causal, **named,
        ),
        resume=resume, minutes=minutes, quiet=quiet, as_json=as_json,
    )  # fmt: skip
