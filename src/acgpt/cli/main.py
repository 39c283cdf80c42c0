"""The command `acgpt`: all subcommands, and how errors become messages and exit codes.

Each command calls the Python API and prints the result: for people by default, as JSON lines with `--json`. Templates
are an argument, a document, or lines of a file or a pipe; each is answered before the next is read. Errors that the
user can fix print one message and exit with code 2, errors of the disk with code 1.

torch and transformers take seconds to import, so commands import them only when they need them.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from acgpt.cli import (
    draw,
    evaluate,
    experiment,
    finetune,
    generate,
    infill,
    mauve,
    merge,
    methods,
    prepare,
    push,
    rank,
    report,
    score,
    serve,
    show,
    train,
)
from acgpt.cli.ui import option, replace_unprintable
from acgpt.common.options import for_command_line
from acgpt.errors import InputError, OutputError, ServerError
from acgpt.version import __version__

# ---- how a command ends ---------------------------------------------------------------------------------------------


class Commands(TyperGroup):
    """The command group; handles warnings, errors and signals of all commands."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with tidy(lambda text: in_options(text, self.commands.get(ctx.invoked_subcommand or ""))):
            return super().invoke(ctx)


class TemplateCommand(TyperCommand):
    """A command with a TEMPLATE; suggests quotes if the template is given as several words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        ctx.allow_extra_args = True
        extra: list[str] = super().parse_args(ctx, args)
        if extra:
            template = shlex.quote(" ".join([ctx.params["template"], *extra]))
            ctx.fail(
                f"Expected one TEMPLATE, got {1 + len(extra)} words. Put it in quotes: {ctx.command_path} {template}"
            )
        return extra


def in_options(message: str, command: Any) -> str:
    """Rewrite the Python arguments that a message names as options of the command.

    Only the first line is rewritten: the rest may be text of the user.
    """
    if command is None:
        return message
    parameters = [item for item in command.params if not getattr(item, "hidden", False)]
    flags = {item.name: [name for name in item.opts if name.startswith("--")][:1] for item in parameters}
    names = {item.name: "/".join([*flags[item.name], *item.secondary_opts]) for item in parameters}
    first, *rest = message.split("\n", 1)
    return "\n".join([for_command_line(first, {name: names[name] for name in names if flags[name]}), *rest])


@contextmanager
def tidy(translate: Callable[[str], str] = str) -> Iterator[None]:
    """Print each warning once, on one line; end on errors, Ctrl-C and closed pipes without a traceback.

    Args:
        translate: Rewrites messages of Python functions for the command.
    """
    replace_unprintable()
    printed: set[str] = set()

    def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        text = translate(" ".join(str(message).split()))
        if text not in printed:
            printed.add(text)
            print(f"warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            yield
        except InputError as error:
            print(f"error: {translate(str(error))}", file=sys.stderr)
            raise typer.Exit(2) from error
        except (OutputError, ServerError) as error:
            print(f"error: {translate(str(error))}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(130) from error
        except BrokenPipeError as error:  # the reader has closed the pipe, which is not an error: `acgpt … | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the final flush would fail again
            raise typer.Exit(141) from error
        except OSError as error:  # for example stdout on a full disk
            print(f"error: {error}", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as above
            raise typer.Exit(1) from error


# ---- the commands ---------------------------------------------------------------------------------------------------

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        print(f"acgpt {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    r"""Ask a causal language model for p(any tokens | any other tokens).

    acgpt score  'The capital of France is {{Paris}}, on the Seine.'
        The probability of the text in the slots, token by token.
    acgpt rank   'The {{cat|dog|carburettor}} purred.'
        The alternatives in the slots, best first.
    acgpt infill 'The capital of {{_}} is Paris.' -n 5
        Text for the gaps, best first. {{_3}} is a blank of three tokens.
    acgpt show   'The capital of {{Italy}} is Rome.' -o layout.png
        A picture of the model's input and attention mask.

    In a template, {{double braces}} mark what is asked. The rest is given, before
    and after. Write \{{ for literal braces; inside a slot, also escape { } | _
    and ? with a backslash.

    Train a model: acgpt prepare, then acgpt train or acgpt finetune.
    Measure it: acgpt evaluate, acgpt generate and acgpt mauve.
    Compare models: acgpt experiment (a grid of runs) and acgpt report.
    Share a model: acgpt merge and acgpt push. Serve it: acgpt serve.
    """


for function in (score.score, infill.infill, rank.rank, show.show):
    app.command(cls=TemplateCommand)(function)
app.add_typer(draw.app, name="draw")
app.command()(evaluate.evaluate)
app.command()(experiment.experiment)
app.command()(generate.generate)
app.command()(mauve.mauve)
app.command()(merge.merge)
app.command()(methods.methods)
app.command()(prepare.prepare)
app.command()(push.push)
app.command()(report.report)
app.command()(serve.serve)
app.command()(train.train)
app.command()(finetune.finetune)


def main() -> None:
    """Run the command `acgpt`."""
    app(prog_name="acgpt")
