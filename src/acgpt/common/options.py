"""Declaration of options: each is a dataclass field with a help text and a range.

    @dataclass(frozen=True)
    class TextOptions(Options):
        limit: int | None = option("The first N texts only.", metavar="N", minimum=1)

The keyword arguments of a function (`keywords`), the options of a command (`acgpt.cli.ui.with_options`) and the tables
in the documentation are generated from the fields. Help texts and errors name other options in backticks, as Python
spells them; `for_command_line` rewrites these names for the command line.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from operator import index
from types import UnionType
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypeVar, Union, get_args, get_origin, get_type_hints

from acgpt.errors import InputError

Form = Literal["value", "names", "list", "pairs", "adapter", "adapters", "dtype", "megabytes"]
Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)
Chosen = TypeVar("Chosen", bound="Options")
NAMED = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")  # an option as Python spells it: `limit`, `limit=3`


def ignore(news: object) -> None:
    """Do nothing: the default of callbacks, for drawn tokens say."""


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts.

    Args:
        minimum: Smallest value.
        maximum: Largest value.
        above: Exclusive lower bound.
        below: Exclusive upper bound.
        words: Description of the range; replaces the one that `str` generates.
    """

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    words: str = ""

    def __contains__(self, number: float) -> bool:
        low = (self.minimum is None or number >= self.minimum) and (self.above is None or number > self.above)
        high = (self.maximum is None or number <= self.maximum) and (self.below is None or number < self.below)
        return low and high and number == number  # false for NaN

    def __str__(self) -> str:
        """Describe the range: "at least 1", "from 0 to below 1"."""
        low, least = (self.minimum, "at least") if self.above is None else (self.above, "above")
        high, most = (self.maximum, "at most") if self.below in (None, math.inf) else (self.below, "below")
        if self.words or low is None or high is None:
            bounds = [f"{word} {bound:.12g}" for word, bound in ((least, low), (most, high)) if bound is not None]
            return self.words or " and ".join(bounds)
        if least == "above":
            return f"above {low:.12g} and {most} {high:.12g}"
        return f"from {low:.12g} to {'below ' if most == 'below' else ''}{high:.12g}"


def option(
    help: str,
    default: Any = None,
    *,
    factory: Callable[[], Any] | None = None,
    metavar: str | None = None,
    flags: tuple[str, ...] = (),
    form: Form = "value",
    python: str = "",
    shell: str = "",
    **bounds: Any,
) -> Any:
    """Declare an option as a dataclass field.

    Args:
        help: One or two sentences for users; other options are named in backticks. Empty if `python` and `shell` say
            everything.
        default: Value of the option if it is not given. The help text states what it means.
        factory: Creates the default, for mutable ones.
        metavar: Placeholder of the value in the help of the command.
        flags: Names on the command line. Default: `--` and the field's name.
        form: How the value is written on the command line. "names": separated by commas; "list": option repeated;
            "pairs": KEY=VALUE, option repeated; "adapter": "none" means no adapter; "adapters": likewise, option
            repeated, with names; "dtype": one of the dtype names; "megabytes": MB for a number of bytes.
        python: Additional sentence about the value in Python.
        shell: Additional sentence about the value on the command line.
        **bounds: Arguments of `Range`.
    """
    metadata = {"help": help, "metavar": metavar, "flags": flags, "form": form, "range": Range(**bounds)}
    metadata |= {"python": python, "shell": shell}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(options: type, name: str, **changes: Any) -> Any:
    """Declare an option that another dataclass declares too.

    Args:
        options: The other dataclass.
        name: Name of its field.
        **changes: A different `default`, or different entries of the field's metadata.
    """
    (original,) = (item for item in fields(options) if item.name == name)
    default = changes.pop("default", original.default)
    return field(default=default, metadata={**original.metadata, **changes})


class Options:
    """Base class of dataclasses of options. It checks ranges of numbers and values of `Literal` types.

    Raises:
        InputError: A value has the wrong type, or is out of range.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, allowed, names, whole, optional in checks_of(kind):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if names and value not in names:
                raise InputError(f"{name} must be one of {', '.join(names)}, not {value!r}.")
            if names:
                continue
            boolean = type(value).__name__ in ("bool", "bool_")  # NumPy's, too
            fits = not boolean and isinstance(value, SupportsIndex if whole else SupportsFloat)
            if not fits or (number := index(value) if whole else float(value)) not in allowed:
                bounds = f", {allowed}" if str(allowed) else ""
                raise InputError(f"{name} must be a {'whole ' * whole}number{bounds}, not {value!r}.")
            if type(value) not in (int, float):  # NumPy's numbers cannot be written as JSON
                object.__setattr__(self, name, number)


@cache
def checks_of(options: type) -> list[tuple[str, Range, tuple[str, ...], bool, bool]]:
    """Return what is checked: fields, their ranges, allowed strings, if whole, and if optional."""
    checks, hints = [], get_type_hints(options)
    for item in fields(options):
        allowed, kind = item.metadata.get("range", Range()), last_type(hints[item.name])
        if (names := choices(kind)) or (kind in (int, float) and "range" in item.metadata):
            optional = type(None) in get_args(hints[item.name])
            checks.append((item.name, allowed, names, kind is int, optional))
    return checks


def choices(hint: Any) -> tuple[str, ...]:
    """Return the strings of a type such as `Literal["lines", "documents"]`; empty for other types."""
    values = get_args(hint) if get_origin(hint) is Literal else ()
    return values if all(isinstance(value, str) for value in values) else ()


def value_types(options: type) -> dict[str, Any]:
    """Return the type of each field, without `None`; of a union the last one: `str | Path | None` is `Path`."""
    return {name: last_type(hint) for name, hint in get_type_hints(options).items()}


def last_type(hint: Any) -> Any:
    """Return the last type of a union that is not `None`, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for kind in get_args(hint) if kind is not type(None)][-1]
    return hint


def documented(options: Class) -> Class:
    """Add the fields of a dataclass to its docstring, as the section Args."""
    if options.__doc__:
        options.__doc__ = "\n".join([options.__doc__.rstrip(), "", "    Args:", *argument_lines(options), "    "])
    return options


def keywords(options: type[Options]) -> Callable[[Function], Function]:
    """Document the `**keywords` of a function as the fields of a dataclass, in its signature and docstring.

    The line `**keywords: …` in the section Args of the docstring is replaced by the fields. Fields that are parameters
    of the function keep their place in the signature. A `**` parameter of another name is kept: it also accepts
    keywords that are not fields.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        existing = [parameter for parameter in signature.parameters.values() if parameter.name != "keywords"]
        added = [
            inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type)
            for item in fields(options)  # type: ignore[arg-type]
            if item.name not in signature.parameters
        ]
        last = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        positional = [parameter for parameter in existing if parameter.kind not in last]
        rest = [parameter for parameter in existing if parameter.kind in last]
        function.__signature__ = signature.replace(parameters=[*positional, *added, *rest])  # type: ignore[attr-defined]
        function.__doc__ = with_arguments(function.__doc__, options)
        return function

    return decorate


def with_arguments(text: str | None, options: type) -> str | None:
    """Replace the line `**keywords: …` in a docstring by the fields of a dataclass."""
    lines = textwrap.dedent("\n".join(argument_lines(options)))
    return text and re.sub(r"^( +)\*\*keywords:.*$", lambda m: textwrap.indent(lines, m[1]), text, flags=re.MULTILINE)


def split_keywords(options: type[Chosen], keywords: Mapping[str, Any]) -> tuple[Chosen, dict[str, Any]]:
    """Split keywords into an object of a dataclass of options and a dictionary of all others."""
    names = {item.name for item in fields(options)}  # type: ignore[arg-type]
    others = {name: value for name, value in keywords.items() if name not in names}
    return options(**{name: value for name, value in keywords.items() if name in names}), others


def argument_lines(options: type) -> list[str]:
    """Return the fields as lines of the section Args of a docstring."""
    lines = []
    for item in sorted(fields(options), key=lambda item: bool(item.kw_only)):  # as in the signature
        text = f"{item.name}: {sentences(item.metadata['help'], item.metadata['python'])}"
        lines += textwrap.wrap(text, 112, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    return lines


def flags_of(options: type) -> dict[str, tuple[str, ...]]:
    """Return the names of each field on the command line."""
    return {item.name: item.metadata["flags"] or (f"--{item.name.replace('_', '-')}",) for item in fields(options)}


def command_help(options: type) -> dict[str, str]:
    """Return the help of each field for the command line, with options spelled as there."""
    names = {name: flags[0] for name, flags in flags_of(options).items()}
    return {
        item.name: for_command_line(sentences(item.metadata["help"], item.metadata["shell"]), names)
        for item in fields(options)
    }


def sentences(*parts: str) -> str:
    """Join the parts that are not empty with spaces."""
    return " ".join(filter(None, parts))


def for_command_line(text: str, flags: Mapping[str, str]) -> str:
    """Rewrite options that a text names in backticks as the command line spells them.

    >>> flags = {"r_max": "--r-max", "if_possible": "--if-possible"}
    >>> for_command_line("leave out `r_max=0.5`, or add `if_possible=True`.", flags)
    'leave out --r-max 0.5, or add --if-possible.'
    >>> for_command_line("`future=False`, `adapter=False`", {"future": "--future/--no-future", "adapter": "--adapter"})
    '--no-future, --adapter none'

    Args:
        text: A help text or an error.
        flags: Flag by name in Python; a slash separates the flag for false. Other names are left unchanged.
    """

    def replace(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in flags:
            return match.group()
        flag, _, opposite = flags[name].partition("/")
        if value in (None, "True"):
            return flag
        return opposite or f"{flag} none" if value == "False" else f"{flag} {value.strip(chr(34) + chr(39))}"

    return NAMED.sub(replace, text)
