"""What can go wrong through no fault of ours: every error a user can cause and mend, and what a disk refuses.

The former derive from `InputError`, so a caller needs one `except`; the command line turns it into exit code 2. The
latter is an `OutputError`, exit code 1. Each message says what was wrong, where, and what to do.
"""

from operator import index

# Control characters as symbols, one for one: printed as they are they could steer the terminal.
CONTROLS = {code: chr(0x2400 + code) for code in range(32)} | {127: "␡"} | dict.fromkeys(range(128, 160), "\ufffd")


NO_CODE = "acgpt runs no code from a checkpoint"  # for errors
LONGEST = 400  # characters of another program's error
UNSPOKEN = (ArithmeticError, AttributeError, LookupError, TypeError)  # errors that need their names to be understood


class InputError(ValueError):
    """The input cannot be answered as it stands; the message says what to change."""


class OutputError(OSError):
    """Something cannot be written; what had been written before stays."""


class TemplateError(InputError):
    """A template is malformed, or has no (or the wrong kind of) slot for what was asked of it."""

    def __init__(self, problem: str, template: str, at: int) -> None:
        self.problem, self.template, self.at = problem, template, at
        super().__init__(f"{problem}\n{point_at(template, at)}")


class QueryError(InputError):
    """A query contradicts itself, or does not fit the model it is put to."""


class ModelError(InputError):
    """A model, adapter or tokenizer cannot be loaded, or cannot be asked such questions exactly."""


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """The argument of this name as an int; a boolean is none.

    Raises:
        InputError: It is no whole number, or less than `least`.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f", at least {least}"
        raise InputError(f"{name} must be a whole number{bound}, not {value!r}.")
    return number


def reason(error: object) -> str:
    """The error of another program, or any value, in one line of moderate length, with no full stop.

    >>> reason(KeyError("peft_type"))
    "KeyError 'peft_type'"
    """
    if isinstance(error, ValueError) and "trust_remote_code" in str(error):  # transformers' advice is to allow it
        return f"it needs code of its own, and {NO_CODE}"
    words = " ".join(str(error).translate(CONTROLS | {9: " ", 10: " ", 13: " "}).split())
    words = words.partition(" Exception raised from ")[0]  # torch goes on with places in its own code
    if isinstance(error, BaseException) and (not words or isinstance(error, UNSPOKEN)):
        words = f"{type(error).__name__} {words}".rstrip()
    if len(words) > LONGEST:
        sentences = words[:LONGEST].rpartition(". ")[0]
        words = sentences or words[: LONGEST - 1] + "…"
    return words.rstrip(".")


def point_at(text: str, at: int, width: int = 72) -> str:
    """The neighbourhood of character `at`, with a caret under it: two indented lines."""
    start = max(0, at - width // 2)
    excerpt = text[start : start + width].translate(CONTROLS | {10: "⏎", 13: "⏎", 9: "→"})
    lead = "…" if start else ""
    trail = "…" if start + width < len(text) else ""
    return f"  {lead}{excerpt}{trail}\n  {' ' * (len(lead) + at - start)}^"
