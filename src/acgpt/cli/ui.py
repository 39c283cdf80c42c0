"""What commands share: options, quiet libraries, and JSON for programs."""

from __future__ import annotations

import codecs
import inspect
import io
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from acgpt.common.files import finite
from acgpt.common.options import Options, choices, command_help, flags_of, spelled, value_types
from acgpt.errors import InputError

Dtype = StrEnum("Dtype", ["auto", "float32", "bfloat16", "float16", "float64"])


def option(*names: str, **how: Any) -> Any:
    """An option whose default, where there is one to show, its help text names."""
    return typer.Option(*names, show_default=False, **how)


HELP = {
    "template": "A text with {{slots}}, in quotes; or - to read templates from standard input, one a line.",
    "file": "Read templates from this UTF-8 file, one a line.",
    "json": "For programs: one JSON object a template, in a line of its own, with the keys named above.",
    "object": "For programs: one JSON object in a line, with the keys named above.",
    "quiet": "Show no progress.",
}
PAUSE = 30.0  # seconds between two lines on what is done, where nobody is watching
NO_ADAPTER = "none"  # what --adapter says for it
TemplateArgument = Annotated[str | None, typer.Argument(metavar="TEMPLATE", show_default=False, help=HELP["template"])]
FileOption = Annotated[Path | None, option("--file", "-f", metavar="PATH", help=HELP["file"])]
JsonOption = Annotated[bool, option("--json", help=HELP["json"])]
ObjectOption = Annotated[bool, option("--json", help=HELP["object"])]
QuietOption = Annotated[bool, option("--quiet", "-q", help=HELP["quiet"])]


def emit(answer: Mapping[str, Any]) -> None:
    """Print one JSON object in a line of its own, at once."""
    print(json.dumps(finite(answer), allow_nan=False), flush=True)


def names_in(text: str | None) -> list[str]:
    """What an option that takes several values, with commas, names."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def chosen_adapter(adapter: str | None) -> str | Literal[False] | None:
    """What --adapter says, as `acgpt.load` takes it."""
    return False if adapter == NO_ADAPTER else adapter


def named_adapters(texts: Sequence[str]) -> dict[str, str] | str | Literal[False] | None:
    """What --adapter says: nothing, one adapter, some by name, or that there is to be none."""
    if list(texts) == [NO_ADAPTER]:
        return False
    named: dict[str, str] = {}
    for each in texts:
        name, equals, path = each.partition("=")
        if not (equals and re.fullmatch(r"[\w-]+", name)) or Path(each).exists():
            if len(texts) > 1:
                raise InputError(f"of several adapters each needs a name: --adapter NAME={each}")
            return each
        if name in named:
            raise InputError(f"two adapters are called {name}: --adapter {each}")
        named[name] = path
    return named or None


# ---- options that a dataclass declares ----------------------------------------------------------------------------


def key_values(texts: list[str] | None) -> dict[str, str]:
    """The pairs of an option that takes KEY=VALUE and may be repeated."""
    from acgpt.methods import parted

    return dict(parted(text) for text in texts or ())


def bytes_in(megabytes: float) -> int:
    """The bytes of a number of MB."""
    if not math.isfinite(megabytes):
        raise typer.BadParameter(f"{megabytes} is no number of MB.")
    return round(megabytes * 2**20)


def no_value(default: Any) -> None:
    """The default of an option whose form has nothing to stand for the field's."""


# How the command line writes a value: its type there, its default, made of the field's, and how it is read.
FORMS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "names": (str | None, no_value, names_in),
    "list": (list[str] | None, no_value, lambda texts: tuple(texts or ())),
    "pairs": (list[str] | None, no_value, key_values),
    "adapter": (str | None, no_value, chosen_adapter),
    "adapters": (list[str] | None, no_value, lambda texts: named_adapters(texts or ())),
    "dtype": (Dtype, Dtype, lambda dtype: dtype.value),
    "megabytes": (float, lambda size: size / 2**20, bytes_in),
}


def takes(options: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that a dataclass declares, in place of its parameter `options`.

    The command is called with one object of that dataclass, after typer has checked the values.
    """
    flags, hints, words = flags_of(options), value_types(options), command_help(options)

    def parameter(each: Field[Any]) -> inspect.Parameter:
        about, default, how = each.metadata, each.default, {}
        kind: Any = hints[each.name]
        if about["form"] in FORMS:
            kind, default = FORMS[about["form"]][0], FORMS[about["form"]][1](each.default)
        else:
            allowed, words_of = about["range"], choices(kind)
            kind = StrEnum(each.name, list(words_of)) if words_of else kind
            how = {} if kind is bool or words_of else {"min": allowed.minimum, "max": allowed.maximum}
            kind = kind if default is not None else kind | None
        how |= {"help": words[each.name], "metavar": about["metavar"]}
        annotation: Any = Annotated[kind, option(*flags[each.name], **how)]
        return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for own in signature.parameters.values():
            named = own.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters += map(parameter, fields(options)) if own.name == "options" else [named]  # type: ignore[arg-type]

        def command(**values: Any) -> None:
            chosen = {}
            for each in fields(options):  # type: ignore[arg-type]
                value, form = values.pop(each.name), each.metadata["form"]
                value = value.value if isinstance(value, StrEnum) and form not in FORMS else value
                chosen[each.name] = FORMS[form][2](value) if form in FORMS else value
            function(**values, options=options(**chosen))

        command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def note_for(options: Options) -> Callable[[str], None]:
    """Make a function that tells the user something on standard error, in words of the command with these options."""
    names = {name: flags[0] for name, flags in flags_of(type(options)).items()}
    return lambda text: print(f"note: {spelled(text, names)}", file=sys.stderr)


def called(model: str, adapter: str | None) -> str:
    """A model and its adapter, as a result names them, for people."""
    from acgpt.models.loading import is_default
    from acgpt.models.metadata import DEFAULT

    if is_default(model) and adapter in (DEFAULT, None):
        return f"{model}, {'without' if adapter is None else 'with'} its adapter"
    return model if adapter is None else f"{model} + {adapter}"


class Stopped(BaseException):
    """SIGTERM has come."""


@contextmanager
def stoppable(way_on: Callable[[], str]) -> Iterator[None]:
    """Within, SIGTERM and Ctrl-C end the command with words on how to go on, and with the exit codes of training.

    Args:
        way_on: Says how the command is taken up again; called once it has ended.
    """

    def stop(number: int, where: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut short what the first has kept
        raise Stopped

    main = threading.current_thread() is threading.main_thread()  # only there can signals be handled
    heard = main and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
    before = signal.signal(signal.SIGTERM, stop) if heard else None
    try:
        yield
    except Stopped as error:
        print(f"stopped. {way_on()}", file=sys.stderr)
        raise typer.Exit(3) from error
    except KeyboardInterrupt as error:
        print(f"\ninterrupted. {way_on()}", file=sys.stderr)
        raise typer.Exit(130) from error
    finally:
        if heard:
            signal.signal(signal.SIGTERM, before)


# What stands for characters that a terminal cannot write; for all others, a question mark.
PLAIN = {"–": "-", "…": "...", "∞": "inf", "→": ">", "│": "|", "■": "#", "·": ".", "□": "o", "⟦": "[", "⟧": "]"}
PLAIN |= {"≤": "<=", "✓": "yes", "✗": "no", "σ": "sigma"}
PLAIN |= {"“": '"', "”": '"', "’": "'", "␣": "_", "█": "#", "▏": "|"} | dict(zip("▁▂▃▄▅▆▇", "1234567", strict=True))


def speak_plainly() -> None:
    """Have an answer written also where not all of its characters can be: under PYTHONIOENCODING=ascii, say."""

    def stand_in(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        plain = "".join(PLAIN.get(each, "?") for each in error.object[error.start : error.end])
        return plain, error.end

    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error writes them as escapes
        codecs.register_error("acgpt-plain", stand_in)
        sys.stdout.reconfigure(errors="acgpt-plain")


def hush(quiet: bool = False) -> None:
    """Silence the logs of transformers and its hub below errors, and progress bars unless somebody is watching.

    Args:
        quiet: No progress bars even then.
    """
    silent = quiet or not sys.stderr.isatty()
    if silent:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()
    if silent:
        logging.disable_progress_bar()


class Bars:
    """The progress bars of a command, on standard error.

    Where that is no terminal, a line says now and then how many are done, of how many: at most one in `PAUSE` seconds,
    whichever bar it is of.

    Args:
        quiet: Show nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.printed = time.monotonic()  # when the last line was, or when the command began

    @contextmanager
    def __call__(self, what: str) -> Iterator[Callable[..., None]]:
        """Show a bar within the context.

        What it yields is called with how many are done, of how many, and, if a rate is to be shown, the tokens so far.
        """
        if self.quiet:
            yield lambda *_: None
            return
        if not sys.stderr.isatty():
            yield lambda done, total, tokens=0: self.line(what, done, total)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        rate = TextColumn("{task.fields[rate]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(what, total=None, rate="")

            def update(done: int, total: int, tokens: int = 0) -> None:
                elapsed = shown.tasks[0].elapsed
                rate = f"{tokens / elapsed:,.0f} tokens/s" if tokens and elapsed else ""
                shown.update(task, completed=done, total=total, rate=rate)

            yield update

    def line(self, what: str, done: int, total: int) -> None:
        """Print how many are done, unless a line was printed less than `PAUSE` seconds ago."""
        if time.monotonic() - self.printed >= PAUSE:
            self.printed = time.monotonic()
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)
