"""What commands share: options, quiet libraries, and JSON for programs."""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Dtype = StrEnum("Dtype", ["auto", "float32", "bfloat16", "float16", "float64"])


def option(*names: str, **how: Any) -> Any:
    """An option whose default, where there is one to show, its help text names."""
    return typer.Option(*names, show_default=False, **how)


HELP = {
    "template": "A text with {{slots}}, in quotes; or - to read templates from standard input, one a line.",
    "file": "Read templates from this UTF-8 file, one a line.",
    "model": "A folder, a Hugging Face hub id or a .gguf file. Default: the embedded SmolLM2-135M-Instruct, "
    "with an adapter that reads the future.",
    "adapter": "A PEFT adapter for the model: a folder or a hub id; none: no adapter, for the embedded model too.",
    "device": "auto, cpu, cuda, cuda:1, mps. Default: auto, the best there is.",
    "dtype": "auto, float32, bfloat16, float16, float64. Default: auto, float32; on CUDA, what the checkpoint has.",
    "future": "Use what stands after a slot? Default: if the model says that it can (score shows both).",
    "json": "For programs: one JSON object a template, in a line of its own, with the keys named above.",
}
NO_ANSWER = "--"  # of a mode that a method cannot answer
PAUSE = 30.0  # seconds between two lines on what is done, where nobody is watching
said = time.monotonic()  # when the last of them was printed, or the program began
NO_ADAPTER = "none"  # what --adapter says for it
TemplateArgument = Annotated[str | None, typer.Argument(metavar="TEMPLATE", show_default=False, help=HELP["template"])]
FileOption = Annotated[Path | None, option("--file", "-f", metavar="PATH", help=HELP["file"])]
ModelOption = Annotated[str | None, option("--model", "-m", metavar="NAME", help=HELP["model"])]
AdapterOption = Annotated[str | None, option("--adapter", "-a", metavar="NAME", help=HELP["adapter"])]
DeviceOption = Annotated[str, option("--device", metavar="NAME", help=HELP["device"])]
DtypeOption = Annotated[Dtype, option("--dtype", metavar="NAME", help=HELP["dtype"])]
FutureOption = Annotated[bool | None, option("--future/--no-future", help=HELP["future"])]
JsonOption = Annotated[bool, option("--json", help=HELP["json"])]


def finite(value: Any) -> Any:
    """What JSON can hold: an infinite number becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def emit(answer: Mapping[str, Any]) -> None:
    """Print one JSON object in a line of its own, at once."""
    print(json.dumps(finite(answer), allow_nan=False), flush=True)


def names_in(text: str | None) -> list[str]:
    """What an option that takes several values, with commas, names."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def chosen_adapter(adapter: str | None) -> str | Literal[False] | None:
    """What --adapter says, as `acgpt.load` takes it."""
    return False if adapter == NO_ADAPTER else adapter


def note(text: str) -> None:
    """Tell the user something on standard error."""
    print(f"note: {text}", file=sys.stderr)


def called(model: str, adapter: str | None) -> str:
    """A model and its adapter, as a result names them, for people."""
    from acgpt.models.loading import is_default
    from acgpt.models.metadata import DEFAULT

    if is_default(model) and adapter in (DEFAULT, None):
        return f"{model}, {'without' if adapter is None else 'with'} its adapter"
    return model if adapter is None else f"{model} + {adapter}"


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


@contextmanager
def bar(what: str, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error, or a line there now and then if that is no terminal; nothing if `quiet`.

    What it yields is called with how many are done, of how many, and, if a rate is to be shown, the tokens so far.
    """
    if quiet:
        yield lambda *_: None
        return
    if not sys.stderr.isatty():
        yield now_and_then(what)
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


def now_and_then(what: str) -> Callable[..., None]:
    """Say how many are done, of how many, but no more often than every `PAUSE` seconds, whatever else was said."""

    def update(done: int, total: int, tokens: int = 0) -> None:
        global said
        if time.monotonic() - said >= PAUSE:
            said = time.monotonic()
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return update
