"""Options that are declared once, each as a dataclass field with its help and its range.

    @dataclass(frozen=True)
    class TextOptions(Options):
        limit: int | None = option("The first N texts only.", metavar="N", minimum=1)

The keyword arguments of a function (`keywords`), the options of a command (`acgpt.cli.ui.takes`) and the tables in the
documentation are made from the fields. A help text or an error names another option in backticks, as Python spells it;
`spelled` rewrites these names for the command line.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from acgpt.errors import InputError, whole_number

Form = Literal["value", "names", "pairs", "adapter", "adapters", "dtype"]
Function = TypeVar("Function", bound=Callable[..., Any])
NAMED = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")  # an option as Python spells it: `limit`, `limit=3`


def option(
    help: str,
    default: Any = None,
    *,
    metavar: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    flags: tuple[str, ...] = (),
    form: Form = "value",
) -> Any:
    """Declare an option as a dataclass field.

    Args:
        help: One or two sentences for users; other options are named in backticks.
        default: The value where none is given. The help says what it stands for.
        metavar: The placeholder of the value in the command's help.
        minimum: Least value.
        maximum: Greatest value.
        flags: Names on the command line, if they are not `--` and the field's name.
        form: How the command line writes the value: "names" with commas, "pairs" as KEY=VALUE, repeatedly, "adapter"
            with "none" for no adapter, "adapters" likewise and repeatedly, with names, "dtype" as one of its names.
    """
    about = {"help": help, "metavar": metavar, "min": minimum, "max": maximum, "flags": flags, "form": form}
    return field(default=default, metadata=about)


class Options:
    """Base of dataclasses of options: checks the range of every value.

    Raises:
        InputError: A value is outside of its range, or of another type.
    """

    def __post_init__(self) -> None:
        hints = value_types(type(self))
        for each in fields(self):  # type: ignore[arg-type]
            value, low, high = getattr(self, each.name), each.metadata.get("min"), each.metadata.get("max")
            if value is None or (low, high) == (None, None):
                continue
            if hints[each.name] is int:
                whole_number(each.name, value, least=low)
            else:
                check_number(each.name, value, low, high)


def check_number(name: str, value: object, low: float | None, high: float | None) -> None:
    """Refuse a value that is no number within the range.

    Raises:
        InputError: It is none.
    """
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if (-math.inf if low is None else low) <= number <= (math.inf if high is None else high):
        return
    bounds = [f"at least {low:g}"] * (low is not None) + [f"at most {high:g}"] * (high is not None)
    raise InputError(f"{name} must be a number, {' and '.join(bounds)}, not {value!r}.")


def value_types(options: type) -> dict[str, Any]:
    """The type of each field without `None`; of several, the last: `str | Path | None` is `Path`."""
    return {name: last_type(hint) for name, hint in get_type_hints(options).items()}


def last_type(hint: Any) -> Any:
    """The last type of a union that is not `None`, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        return [each for each in get_args(hint) if each is not type(None)][-1]
    return hint


def keywords(options: type[Options]) -> Callable[[Function], Function]:
    """Document the `**keywords` of a function as the fields of a dataclass, in its signature and its docstring.

    The docstring has a line `**keywords: …` in its section Args, in whose place the fields are listed.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(options)  # type: ignore[arg-type]
        ]
        positional = [each for each in own if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        rest = [each for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY]
        function.__signature__ = signature.replace(parameters=[*positional, *added, *rest])  # type: ignore[attr-defined]
        if function.__doc__:
            lines = "\n".join(argument_lines(options))
            function.__doc__ = re.sub(r"^ +\*\*keywords:.*$", lambda _: lines, function.__doc__, flags=re.MULTILINE)
        return function

    return decorate


def argument_lines(options: type[Options]) -> list[str]:
    """The fields as lines of a docstring's section Args."""
    found = []
    for each in fields(options):  # type: ignore[arg-type]
        text = f"{each.name}: {each.metadata['help']}"
        found += textwrap.wrap(text, 112, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return found


def spelled(text: str, flags: Mapping[str, str]) -> str:
    """Write the options that a text names in backticks as the command line spells them.

    >>> flags = {"r_max": "--r-max", "if_possible": "--if-possible"}
    >>> spelled("leave out `r_max=0.5`, or add `if_possible=True`.", flags)
    'leave out --r-max 0.5, or add --if-possible.'

    Args:
        text: A help text or an error.
        flags: The name on the command line by the name in Python; what is not among them stays as it is.
    """

    def replace(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in flags:
            return match.group()
        return flags[name] if value in (None, "True") else f"{flags[name]} {value.strip(chr(34) + chr(39))}"

    return NAMED.sub(replace, text)
