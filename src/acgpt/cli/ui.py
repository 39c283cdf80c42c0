"""Code that commands share: options, progress bars, JSON output, signals."""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from acgpt.common.files import finite
from acgpt.common.options import Options, choices, command_help, flags_of, for_command_line, value_types
from acgpt.common.signals import handling
from acgpt.errors import InputError

Dtype = StrEnum("Dtype", ["auto", "float32", "bfloat16", "float16", "float64"])


def option(*names: str, **settings: Any) -> Any:
    """Declare an option of a command. Its help text states the default, so typer need not."""
    return typer.Option(*names, show_default=False, **settings)


HELP = {
    "template": "Text with {{slots}}, in quotes. - reads templates from stdin, one per line.",
    "file": "Read templates from a UTF-8 file, one per line.",
    "document": "Read a whole UTF-8 file as one template; - is stdin.",
    "json": "Print one JSON object per template and line (keys above).",
    "object": "Print the result as JSON, in one line (keys above).",
    "quiet": "Show no progress.",
}
SHOWN = 99_999  # largest bound that the help shows beside an option
PAUSE = 30.0  # seconds between two progress lines if stderr is not a terminal
NO_ADAPTER = "none"  # value of --adapter for no adapter
TemplateArgument = Annotated[str | None, typer.Argument(metavar="TEMPLATE", show_default=False, help=HELP["template"])]
FileOption = Annotated[Path | None, option("--file", "-f", metavar="PATH", help=HELP["file"])]
DocumentOption = Annotated[Path | None, option("--document", "-d", metavar="PATH", help=HELP["document"])]
JsonOption = Annotated[bool, option("--json", help=HELP["json"])]
ObjectOption = Annotated[bool, option("--json", help=HELP["object"])]
QuietOption = Annotated[bool, option("--quiet", "-q", help=HELP["quiet"])]


def emit(answer: Mapping[str, Any]) -> None:
    """Print a JSON object on a line of its own and flush."""
    print(json.dumps(finite(answer), allow_nan=False), flush=True)


def names_in(text: str | None) -> list[str]:
    """Split the value of an option at commas."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def chosen_adapter(adapter: str | None) -> str | Literal[False] | None:
    """Convert the value of --adapter to what `acgpt.load` takes."""
    return False if adapter == NO_ADAPTER else adapter


def named_adapters(texts: Sequence[str]) -> dict[str, str] | str | Literal[False] | None:
    """Convert the values of --adapter to what `acgpt.load` takes: one adapter, adapters by name, `False` or `None`."""
    if list(texts) == [NO_ADAPTER]:
        return False
    named: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (equals and re.fullmatch(r"[\w-]+", name)) or Path(text).exists():
            if len(texts) > 1:
                raise InputError(f"several adapters need a name each: --adapter NAME={text}")
            return text
        if name in named:
            raise InputError(f"two adapters have the name {name}: --adapter {text}")
        named[name] = path
    return named or None


# ---- options that a dataclass declares ----------------------------------------------------------------------------


def key_values(texts: list[str] | None) -> dict[str, str]:
    """Parse the values of an option that takes KEY=VALUE and may be repeated."""
    from acgpt.methods import split_option

    return dict(split_option(text) for text in texts or ())


def bytes_in(megabytes: float) -> int:
    """Convert MB to bytes."""
    if not math.isfinite(megabytes):
        raise typer.BadParameter(f"{megabytes} is not a number of MB.")
    return round(megabytes * 2**20)


def number_or_text(kind: type[int | float]) -> Callable[[Any], Any]:
    """Return a function that parses a number, and returns a text that is none, which `Options` refuses."""

    def parse(text: Any) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    parse.__name__ = kind.__name__  # older versions of typer show it
    return parse


def no_value(default: Any) -> None:
    """Return `None`, for forms whose type on the command line cannot represent the default of the field."""


# By form: the type on the command line, a function that converts the default of the field, and one that parses values.
FORMS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "names": (str | None, no_value, names_in),
    "list": (list[str] | None, no_value, lambda texts: tuple(texts or ())),
    "pairs": (list[str] | None, no_value, key_values),
    "adapter": (str | None, no_value, chosen_adapter),
    "adapters": (list[str] | None, no_value, lambda texts: named_adapters(texts or ())),
    "dtype": (Dtype, Dtype, lambda dtype: dtype.value),
    "megabytes": (float, lambda size: size / 2**20, bytes_in),
}


def with_options(options: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that a dataclass declares, in place of its parameter `options`.

    The dataclass checks the values; the command is called with one object of it.
    """
    flags, hints, help_texts = flags_of(options), value_types(options), command_help(options)

    def parameter_of(item: Field[Any]) -> inspect.Parameter:
        metadata, default, settings = item.metadata, item.default, {}
        kind: Any = hints[item.name]
        if metadata["form"] in FORMS:
            kind, default = FORMS[metadata["form"]][0], FORMS[metadata["form"]][1](item.default)
        else:
            allowed, names = metadata["range"], choices(kind)
            kind = StrEnum(item.name, list(names)) if names else kind
            most = None if (allowed.maximum or 0) > SHOWN else allowed.maximum
            if kind in (int, float):  # the help shows the range, and `Options` checks it
                settings = {"min": allowed.minimum, "max": most, "parser": number_or_text(kind)}
            kind = kind if default is not None else kind | None
        settings |= {"help": help_texts[item.name], "metavar": metadata["metavar"]}
        annotation: Any = Annotated[kind, option(*flags[item.name], **settings)]
        return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for existing in signature.parameters.values():
            if existing.name == "options":
                parameters += map(parameter_of, fields(options))  # type: ignore[arg-type]
            else:
                parameters.append(existing.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def command(**values: Any) -> None:
            chosen = {}
            for item in fields(options):  # type: ignore[arg-type]
                value, form = values.pop(item.name), item.metadata["form"]
                value = value.value if isinstance(value, StrEnum) and form not in FORMS else value
                chosen[item.name] = FORMS[form][2](value) if form in FORMS else value
            try:
                made = options(**chosen)
            except InputError as error:  # it begins with the name of a field
                name, space, problem = str(error).partition(" ")
                raise typer.BadParameter(f"{flags.get(name, (name,))[0]}{space}{problem}") from error
            function(**values, options=made)

        command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def note_for(options: Options) -> Callable[[str], None]:
    """Return a function that prints a note to stderr, with options spelled as on the command line."""
    names = {name: flags[0] for name, flags in flags_of(type(options)).items()}
    return lambda text: print(f"note: {for_command_line(text, names)}", file=sys.stderr)


def model_title(model: str, adapter: str | None) -> str:
    """Describe a model and its adapter, from the fields of a result."""
    from acgpt.models.loading import is_default
    from acgpt.models.metadata import DEFAULT

    if is_default(model) and adapter in (DEFAULT, None):
        return f"{model}, {'without' if adapter is None else 'with'} its adapter"
    return model if adapter is None else f"{model} + {adapter}"


class Stopped(BaseException):
    """SIGTERM was received."""


@contextmanager
def stoppable(resume_hint: Callable[[], str]) -> Iterator[None]:
    """End the command on SIGTERM (exit code 3) and Ctrl-C (130), and print how to resume it.

    Args:
        resume_hint: Returns how to resume the command; called after it has ended.
    """

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt saving after the first
        raise Stopped

    with handling(stop, "SIGTERM"):
        try:
            yield
        except Stopped as error:
            print(f"stopped. {resume_hint()}", file=sys.stderr)
            raise typer.Exit(3) from error
        except KeyboardInterrupt as error:
            print(f"\ninterrupted. {resume_hint()}", file=sys.stderr)
            raise typer.Exit(130) from error


def replace_unprintable() -> None:
    """Print a question mark for each character that stdout cannot encode, for example under PYTHONIOENCODING=ascii."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr writes escapes by default
        sys.stdout.reconfigure(errors="replace")


def silence_libraries(quiet: bool = False) -> None:
    """Silence logs of transformers and huggingface_hub below errors, and progress bars if stderr is not a terminal.

    Args:
        quiet: Silence progress bars on a terminal too.
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
    """The progress bars of a command, on stderr.

    If stderr is not a terminal, a line with the counts is printed instead, at most once in `PAUSE` seconds for all bars
    together.

    Args:
        quiet: Show nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.printed = time.monotonic()  # time of the last line, or of the start

    @contextmanager
    def __call__(self, what: str) -> Iterator[Callable[..., None]]:
        """Show a bar inside the context.

        Args:
            what: Label of the bar.

        Yields:
            A function that updates the bar. Its arguments are the number done, the total (`None` if it is unknown)
            and, to show a rate, the number of tokens so far.
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

            def update(done: int, total: int | None, tokens: int = 0) -> None:
                elapsed = shown.tasks[0].elapsed
                rate = f"{tokens / elapsed:,.0f} tokens/s" if tokens and elapsed else ""
                shown.update(task, completed=done, total=total, rate=rate)

            yield update

    def line(self, what: str, done: int, total: int | None) -> None:
        """Print the counts, unless a line was printed less than `PAUSE` seconds ago."""
        if time.monotonic() - self.printed >= PAUSE:
            self.printed = time.monotonic()
            of = "" if total is None else f" of {total:,}"
            print(f"{what}: {done:,}{of}", file=sys.stderr, flush=True)
