"""Code shared by the commands that answer templates: reading templates, and fields of answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import typer

from acgpt.cli.ui import silence_libraries
from acgpt.common.memory import gc_paused
from acgpt.errors import InputError, TemplateError
from acgpt.models.answer_json import to_json
from acgpt.models.options import LoadedOptions, ServedOptions
from acgpt.models.paths import check_paths
from acgpt.query.template import check_slots, parse

if TYPE_CHECKING:
    from acgpt.client import Client
    from acgpt.display.show import Page
    from acgpt.models.ask import Ask, Ranking, Score
    from acgpt.models.language_model import LanguageModel

Answer = TypeVar("Answer")

BATCH = 16  # number of lines of a file that are answered together
LARGEST = 4 * 2**20  # bytes of a document, some million tokens: more than models read, and few seconds of tokenizing
HINT = "--document PATH reads a whole file as one template."
SCORE = ("log_prob", "perplexity", "bound", "tokens")  # fields of a score for --json


@dataclass(frozen=True)
class Line:
    """A template and where it was read.

    Args:
        template: The template.
        source: Name of the file; "" for the argument of the command.
        number: Number of its line; 0 if the whole file is the template.
    """

    template: str
    source: str = ""
    number: int = 0

    def located(self, error: InputError) -> InputError:
        """Return an error of the template with its file and line, and how to read the whole file as one template."""
        text, number = str(error), self.number
        if isinstance(error, TemplateError):
            if error.at and error.template == self.template:  # not the error of a server
                number = number or self.template.count("\n", 0, error.at) + 1
            if self.number or os.path.isfile(self.template):
                text = f"{text}\n{HINT}"
        where = f"{self.source}, line {number}: " if number else f"{self.source}: "
        return InputError(where + text if self.source else text)


def questions(
    template: str | None, file: Path | None, document: Path | None, check: Callable[[str], object]
) -> Iterator[list[Line]]:
    """Yield the templates in batches. Check them here as far as that needs no model."""
    if [template, file, document].count(None) != 2:
        raise typer.BadParameter(
            "give one TEMPLATE, - to read templates from standard input, --file PATH, or --document PATH."
        )
    if file is None and template != "-":
        return iter([[one_template(template, document, check)]])
    if file in (None, Path("-")):
        return read_lines(standard_input("templates, one per line"), "standard input", 1)
    assert file is not None
    stream = open_input(file, "a text file with one template per line")
    if not file.is_file():  # a named pipe: do not wait for its first line
        return read_lines(stream, str(file), 1)
    groups = read_lines(stream, str(file), BATCH)
    return chain([next(groups)], groups)  # errors in the first batch are reported before a model is loaded


def one_template(template: str | None, document: Path | None, check: Callable[[str], object]) -> Line:
    """Return the argument of a command, or a whole file as one template, after a check that needs no model."""
    if (template is None) == (document is None):
        raise typer.BadParameter("give one TEMPLATE, or --document PATH.")
    line = Line(template or "") if document is None else read_document(document)
    try:
        check(line.template)
    except InputError as error:
        raise line.located(error) from error
    return line


def standard_input(what: str) -> BinaryIO:
    """Return standard input, after a request to type if it is a terminal."""
    if sys.stdin is None:
        raise InputError("standard input is closed: give a TEMPLATE, --file PATH, or --document PATH.")
    if sys.stdin.isatty():
        print(f"Enter {what}; Ctrl-D ends.", file=sys.stderr)
    return sys.stdin.buffer


def open_input(path: Path, wanted: str) -> BinaryIO:
    """Open a file of templates."""
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}. Choose {wanted}.") from error


def read_document(path: Path) -> Line:
    r"""Read a whole file as one template, with line breaks \n and without the last one, which ends its last line.

    Raises:
        InputError: The file is empty, no text in UTF-8, or too large.
    """
    name = "standard input" if path == Path("-") else str(path)
    if path == Path("-"):
        content = standard_input("a text").read(LARGEST + 1)
    else:
        with open_input(path, "a text file") as stream:
            content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise InputError(f"{name} has more than {LARGEST // 2**20} MB, which no model reads at once: choose a part.")
    text = decoded(content, name).replace("\r\n", "\n").removesuffix("\n")
    if not text.strip():
        raise InputError(f"{name} is empty: write a text with {{{{slots}}}}.")
    if "\0" in text:
        raise InputError(f"{name} has null characters, as binary files and UTF-16 have: save the text as UTF-8.")
    return Line(text, name)


def check_scored(template: str) -> None:
    """Check a template to score, as far as that needs no model."""
    check_slots(parse(template), template, scored=True)


def check_filled(template: str, *, patterns: bool = True) -> None:
    """Check a template to fill or sample, as far as that needs no model.

    Args:
        template: The template.
        patterns: Whether to compile the regular expressions of gaps, for which a package is needed.
    """
    for slot in check_slots(parse(template), template):
        if patterns and slot.gap is not None and slot.gap.pattern is not None:
            from acgpt.query.constraint import compiled

            try:
                compiled(slot.gap.pattern)
            except InputError as error:
                raise TemplateError(str(error), template, slot.at) from error


def read_lines(stream: BinaryIO, name: str, size: int) -> Iterator[list[Line]]:
    """Yield groups of `size` non-blank lines as they arrive.

    Raises:
        InputError: A line is not UTF-8, or there is no template.
    """
    group: list[Line] = []
    number, found = 0, False
    for number, raw in enumerate(stream, start=1):
        try:
            text = decoded(raw, f"{name}, line {number}", first=number == 1)
        except InputError:
            if group:
                yield group
            raise
        if text.strip():
            found = True
            group.append(Line(text.rstrip("\r\n"), name, number))
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
    if not found:
        what = "has blank lines only" if number else "is empty"
        raise InputError(f"{name} {what}: write one template per line, such as The {{{{cat}}}} sat on the mat.")


def decoded(content: bytes, name: str, first: bool = True) -> str:
    """Decode UTF-8, without a byte-order mark at the start of a file."""
    try:
        return content.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: byte {error.start + 1} is not UTF-8. Save the text as UTF-8, for example with "
            "iconv -f latin1 -t utf-8."
        ) from error


def answers(groups: Iterable[list[Line]], ask: Callable[[list[str]], Sequence[Answer]]) -> Iterator[tuple[str, Answer]]:
    """Yield every template with its answer, in order. An invalid template raises after those before it are answered."""
    for group in groups:
        try:
            results = list(ask([line.template for line in group]))
        except InputError:  # caused by one of them: answer those before it, and name it
            for line in group:
                try:
                    (result,) = ask([line.template])
                except InputError as error:
                    raise line.located(error) from error
                yield line.template, result
        else:
            yield from zip([line.template for line in group], results, strict=True)


def json_fields(lm: LanguageModel | Client, answer: Score | Ranking, *names: str) -> dict[str, Any]:
    """Return fields of an answer for --json, in the order of `names`.

    Fields that this kind of answer lacks are left out, and so is an adapter of a model that has none, a bound that is
    none, and the probability of lengths that were not predicted.
    """
    content = to_json(answer)
    silent = {"adapter": not lm.adapters, "bound": not content.get("bound")}
    silent["length_log_prob"] = content.get("length_log_prob") is None
    return {name: content[name] for name in names if name in content and not silent.get(name)}


def load(options: ServedOptions) -> LanguageModel | Client:
    """Load the model, or return a client of the server that has it.

    Raises:
        InputError: A server and a model are chosen.
    """
    if options.server is None:
        return load_model(options)
    for item in fields(LoadedOptions):
        if getattr(options, item.name) != item.default:
            raise InputError(f"the server has loaded its model: leave out `{item.name}`, or `server`.")
    from acgpt.client import Client

    return Client(options.server)


def settings(ask: type[Ask], options: ServedOptions) -> dict[str, Any]:
    """Return the settings of a question that a command has as options. Its adapters are those that it loads."""
    names = {item.name for item in fields(ask)} & {item.name for item in fields(options)} - {"adapter"}
    return {name: getattr(options, name) for name in names}


def load_model(options: LoadedOptions) -> LanguageModel:
    """Load the model; print nothing but a progress bar on a terminal."""
    check_paths(options.model, options.adapter)
    with gc_paused(freeze=True):
        silence_libraries()
        from acgpt.models.loading import load

        return load(options.model, options.adapter, options.device, options.dtype)


def note_adapters(page: Page, lm: LanguageModel | Client, results: Mapping[str, Score | Ranking]) -> None:
    """Print which adapter answered, if there are several."""
    if lm.router:
        parts = [f"{name + ': ' if name else ''}{answer.adapter or 'no adapter'}" for name, answer in results.items()]
        page.note(f"answered by {'; '.join(parts)}\n")
