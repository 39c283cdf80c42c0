"""The command line: every command, a file each, and how a command ends.

Each command is a call of the Python API and a way to print its result: for people by default, as JSON lines with
`--json`. Templates come as an argument, or one a line from a file or a pipe; each is answered before the next is waited
for. What the user can mend ends with one message and exit code 2, what the disk refuses with exit code 1.

torch and transformers take seconds to import, so that is left until a question has to be answered.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
    show,
    train,
)
from acgpt.cli.ui import ascii_fallback, option
from acgpt.common.options import for_command_line
from acgpt.errors import InputError, OutputError
from acgpt.version import __version__

# ---- how a command ends ---------------------------------------------------------------------------------------------


class Commands(TyperGroup):
    """The commands, each of which ends tidily whatever happens in it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        with tidy(lambda text: in_options(text, self.commands.get(ctx.invoked_subcommand or ""))):
            return super().invoke(ctx)


def in_options(message: str, command: Any) -> str:
    """Write the arguments that an error or a warning of a Python function names as the options of the command.

    Only its first line names any: what follows may be the user's own text.
    """
    if command is None:
        return message
    flags = {each.name: [name for name in each.opts if name.startswith("--")][:1] for each in command.params}
    names = {each.name: "/".join([*flags[each.name], *each.secondary_opts]) for each in command.params}
    first, *rest = message.split("\n", 1)
    return "\n".join([for_command_line(first, {name: names[name] for name in names if flags[name]}), *rest])


@contextmanager
def tidy(translate: Callable[[str], str] = str) -> Iterator[None]:
    """Warnings as one line each, once; errors that the user can mend, Ctrl-C and a closed pipe without a traceback.

    Args:
        translate: Makes of a Python function's message the command's.
    """
    ascii_fallback()
    said: set[str] = set()

    def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        text = translate(" ".join(str(message).split()))
        if text not in said:
            said.add(text)
            print(f"warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            yield
        except InputError as error:
            print(f"error: {translate(str(error))}", file=sys.stderr)
            raise typer.Exit(2) from error
        except OutputError as error:
            print(f"error: {translate(str(error))}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(130) from error
        except BrokenPipeError as error:  # nobody reads on, which is no mistake: `acgpt … | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would fail again
            raise typer.Exit(141) from error
        except OSError as error:  # standard output on a full disk, say
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
    """Print the version and end."""
    if wanted:
        print(f"acgpt {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, option("--version", callback=print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    r"""Ask a causal language model for p(any tokens | any other tokens).

    A template is a text in which {{double braces}} mark what is asked.
    All the rest is given, whether it stands before or after.

    acgpt score  'The capital of France is {{Paris}}, on the Seine.'
        How likely is this, token by token?
    acgpt rank   'The {{cat|dog|carburettor}} purred.'
        Which alternative fits best?
    acgpt infill 'The cat {{_3}} on the {{_1}}.' -n 5
        What could stand here? {{_3}} is a blank of three tokens.
    acgpt show   'The capital of {{Italy}} is Rome.' -o layout.png
        What is the model told? Its input and its attention mask, drawn.

    A model of your own: acgpt prepare (text to tokens), acgpt train or
    acgpt finetune, acgpt evaluate, acgpt generate and acgpt mauve (samples, and
    their score); acgpt draw pictures what they give and ask; acgpt experiment
    does that for a grid of them, and acgpt report compares what was trained.
    acgpt merge and acgpt push: an adapter into its model, a model or adapter to
    others.

    For braces that are text write \{{. Inside a slot, a backslash makes text
    of { } | and _ likewise. acgpt COMMAND --help explains the rest.
    """


app.command()(score.score)
app.command()(infill.infill)
app.command()(rank.rank)
app.command()(show.show)
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
app.command()(train.train)
app.command()(finetune.finetune)


def main() -> None:
    """The entry point of the command `acgpt`."""
    app(prog_name="acgpt")
