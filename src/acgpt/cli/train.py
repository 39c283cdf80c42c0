"""`acgpt train`: train a model from scratch and evaluate it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acgpt.cli.evaluate import print_perplexities
from acgpt.cli.ui import ObjectOption, emit, option, silence_libraries, with_options
from acgpt.errors import InputError
from acgpt.training.options import RunOptions

if TYPE_CHECKING:
    from acgpt.training.recipe import Recipe

HELP = {
    "recipe": "YAML file, or name of a built-in recipe (see --list).",
    "changes": "key=value: change a key of the recipe.",
    "list": "List the built-in recipes.",
}
ChangesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False, help=HELP["changes"])
]
ListOption = Annotated[bool, option("--list", help=HELP["list"])]


@with_options(RunOptions)
def train(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", show_default=False, help=HELP["recipe"])] = None,
    changes: ChangesArgument = None,
    list_recipes: ListOption = False,
    *,
    options: RunOptions,
    as_json: ObjectOption = False,
) -> None:
    r"""Train a model from scratch with a recipe.

    acgpt train --list
    acgpt train wikitext103-small corpus=data/wikitext-103 output=runs/small
    acgpt train mine.yaml steps=2000 conditioning.r_max=0.4 model=base
    acgpt train mine.yaml --resume
    until acgpt train mine.yaml --resume --minutes 55; [ $? != 3 ]; do :; done
    torchrun --nproc-per-node 8 -m acgpt train mine.yaml

    Writes a run folder with a log, checkpoints, the trained model (folder model)
    and its perplexities. The same command with --resume continues a run that was
    stopped for any reason. docs/reference/recipes.md explains the keys.

    Keys of --json:
      folder, model (path of the trained model), steps, texts, tokens, parameters,
      loss (the last), seconds, tokens_per_second, wait (share of time without
      data), memory_gib, sittings (hardware of each part of the run),
      evaluation (null, or as in acgpt evaluate: modes, gains, set, …), recipe,
      conditioning, corpus_hash, tokenizer_hash, evaluation_sets, processes,
      fsdp, device, precision, attention, compiled, hardware, versions, command
    """
    from acgpt.training.recipe import load_recipe, recipes_for

    if list_recipes:
        print_recipes(recipes_for(finetuning=False), as_json)
        return
    if recipe is None:
        raise typer.BadParameter("choose a RECIPE: a YAML file, or a name from --list.")
    train_and_report(lambda: load_recipe(recipe, changes or ()), options, as_json)


def train_and_report(load: Callable[[], Recipe], options: RunOptions, as_json: bool) -> None:
    """Load a recipe, train with silenced libraries, and print the results or how to resume."""
    main = int(os.environ.get("RANK", 0)) == 0  # only the first process prints
    try:
        recipe = load()
        silence_libraries()
        from torch import distributed
        from transformers.utils.logging import disable_progress_bar

        from acgpt.training.train import train

        disable_progress_bar()
        try:
            results = train(recipe, resume=options.resume, quiet=options.quiet or not main, minutes=options.minutes)
        except KeyboardInterrupt as error:
            if main:
                print(f"\ninterrupted. {resume_hint(Path(recipe.output))}", file=sys.stderr)
            raise typer.Exit(130) from error
    except InputError as error:
        if main:
            raise
        raise typer.Exit(2) from error  # the first process prints it
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if results is None:
        if main:
            print(f"stopped. {resume_hint(Path(recipe.output))}", file=sys.stderr)
        raise typer.Exit(3)
    if main and as_json:
        emit(results)
    elif main:
        print_results(results)


def resume_hint(folder: Path) -> str:
    """Return how to resume an interrupted run."""
    from acgpt.training.run_folder import last_checkpoint, step_of

    last = last_checkpoint(folder)
    if last is None:
        return "There is no checkpoint yet: the same command with --resume starts over."
    return f"The same command with --resume continues after step {step_of(last)}."


def print_recipes(recipes: dict[str, str], as_json: bool) -> None:
    """Print one line per recipe."""
    if as_json:
        emit(recipes)
        return
    width = max(map(len, recipes))
    for name, text in recipes.items():
        print(f"{name:{width}}  {text}")


def print_results(results: dict[str, Any]) -> None:
    """Print the folder, the cost of training and the perplexities."""
    from acgpt.display.show import Page, printable
    from acgpt.evaluation.dataset import name_texts

    page = Page()
    page.note(printable(results["model"]), "bold")
    page.note(
        f"method {results['recipe']['method']}; {results['steps']:,} steps of {results['recipe']['batch']} texts, "
        f"{results['tokens']:,} tokens in {results['seconds']:,.0f} s, loss {results['loss']:.3f}\n"
    )
    if results["evaluation"] is None:
        page.note(f"not evaluated: the corpus has no text in the split {results['recipe']['eval_split']!r}.")
    else:
        dataset = results["evaluation"]["set"]
        page.note(f"on {name_texts(dataset)}, {dataset['length']} tokens each:\n")
        print_perplexities(page, results["evaluation"])
