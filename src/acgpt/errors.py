"""Errors that users can fix, and errors of the disk.

Errors in the input derive from `InputError`, so a caller needs one `except`; the command line exits with code 2. Failed
writes are an `OutputError`, and what a server cannot answer a `ServerError`; exit code 1. Each message says what is
wrong, where, and what to do.
"""

import json
import logging
import traceback
from operator import index

LOG = logging.getLogger("acgpt.serving")
INNERMOST = 12  # calls of an unexpected error that are logged
BROKEN = "the server cannot answer any more: restart it."

# Control characters by visible symbols, one for one. Printed unchanged they could control the terminal.
CONTROLS = {code: chr(0x2400 + code) for code in range(32)} | {127: "␡"} | dict.fromkeys(range(128, 160), "\ufffd")


NO_CODE = "acgpt runs no code from a checkpoint"  # part of error messages
LONGEST = 400  # maximum number of characters quoted from an error of another library
UNSPOKEN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
)  # errors whose message is unclear without the name of the class


class InputError(ValueError):
    """Invalid input. The message says what to change."""


class OutputError(OSError):
    """A file cannot be written. Files written before are kept."""


class ServerError(OSError):
    """A server cannot be reached, or cannot answer a request.

    Args:
        message: What is wrong.
        status: Status of its reply; `None` if there was none.
        code: Name of the error, see `acgpt.serving.errors`.
    """

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Refused(Exception):
    """A search that a scheduler has not accepted."""


class QueueFull(Refused):
    """Too many searches are waiting."""


class Draining(Refused):
    """The scheduler is being closed, and accepts nothing more."""


class Broken(Refused):
    """The thread of the scheduler has ended with an error."""


class TemplateError(InputError):
    """A template is malformed, or lacks the kind of slot that the operation needs."""

    def __init__(self, problem: str, template: str, at: int) -> None:
        self.problem, self.template, self.at = problem, template, at
        super().__init__(f"{problem}\n{point_at(template, at)}" if template else problem)


class QueryError(InputError):
    """A query is inconsistent, or does not fit the model."""


class ModelError(InputError):
    """A model, adapter or tokenizer cannot be loaded, or cannot answer such queries exactly."""


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """Convert an argument to `int`. Booleans are refused.

    Raises:
        InputError: The value is not a whole number, or less than `least`.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f", at least {least}"
        raise InputError(f"{name} must be a whole number{bound}, not {value!r}.")
    return number


def too_long(tokens: int | str, positions: int) -> QueryError:
    """Return the error for a text that does not fit the model.

    Args:
        tokens: Number of tokens of the text, in words if it is not known exactly.
        positions: Number of positions of the model, of which BOS takes one.
    """
    return QueryError(
        f"the text has {tokens} tokens; the model has {positions} positions, one of them for BOS, so at most "
        f"{positions - 1} tokens are allowed."
    )


def reason(error: object) -> str:
    """Format an error of another library, or any value, as one line of limited length without a full stop.

    >>> reason(KeyError("peft_type"))
    "KeyError 'peft_type'"
    """
    if isinstance(error, ValueError) and "trust_remote_code" in str(error):  # transformers' advice is to allow it
        return f"it needs custom code, and {NO_CODE}"
    words = " ".join(str(error).translate(CONTROLS | {9: " ", 10: " ", 13: " "}).split())
    words = words.partition(" Exception raised from ")[0]  # torch appends a C++ stack trace
    if isinstance(error, BaseException) and (not words or isinstance(error, UNSPOKEN)):
        words = f"{type(error).__name__} {words}".rstrip()
    if len(words) > LONGEST:
        sentences = words[:LONGEST].rpartition(". ")[0]
        words = sentences or words[: LONGEST - 1] + "…"
    return words.rstrip(".")


def point_at(text: str, at: int, width: int = 72) -> str:
    """Return the text around character `at` and a caret below it, as two indented lines."""
    start = max(0, at - width // 2)
    excerpt = text[start : start + width].translate(CONTROLS | {10: "⏎", 13: "⏎", 9: "→"})
    lead = "…" if start else ""
    trail = "…" if start + width < len(text) else ""
    return f"  {lead}{excerpt}{trail}\n  {' ' * (len(lead) + at - start)}^"


def log_failure(error: BaseException) -> None:
    """Log an unexpected error of the server: its class, and the calls that led to it; messages may quote a text."""
    frames = traceback.extract_tb(error.__traceback__)[-INNERMOST:]
    calls = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    LOG.error(json.dumps({"failure": type(error).__name__, "calls": calls}))
