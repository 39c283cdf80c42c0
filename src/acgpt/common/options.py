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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from operator import index
from os import PathLike
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from acgpt.errors import InputError

Form = Literal["value", "names", "list", "pairs", "adapter", "adapters", "dtype", "megabytes"]
Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)
Chosen = TypeVar("Chosen", bound="Options")
REFUSED: Any = object()  # instead of a value that an option does not accept
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
    """Base class of dataclasses of options. It checks the types of values and the ranges of numbers.

    Numbers may be NumPy's; they and whole numbers become `float` where the field is one, and lists become tuples.
    Types without a description in `described` are not checked.

    Raises:
        InputError: A value has the wrong type, or is out of range. The message begins with the name of the field.
    """

    def __post_init__(self) -> None:
        hints = self.types()
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if value is item.default or "range" not in item.metadata:
                continue
            kind, allowed = hints[item.name], item.metadata["range"]
            if (fitting := converted(value, kind, allowed)) is REFUSED:
                raise InputError(f"{item.name} must be {described(kind, allowed)}, not {value!r}.")
            if fitting is not value:
                object.__setattr__(self, item.name, fitting)

    @classmethod
    def types(cls) -> dict[str, Any]:
        """Return the types of the fields."""
        return type_hints(cls)  # type: ignore[arg-type]

    @classmethod
    def of(cls, function: Callable[..., Any], keywords: Mapping[str, Any]) -> Self:
        """Make an object of the keywords of a function.

        Raises:
            TypeError: A keyword is unknown. The error suggests the closest parameter of the function.
        """
        check_keywords(function.__name__, keywords, inspect.signature(function).parameters)
        return cls(**keywords)

    @classmethod
    def read(cls, content: Mapping[str, Any], key: str) -> Self:
        """Make an object of the mapping under a key of a recipe or an experiment.

        Raises:
            InputError: As when the class is called, with `key.` before names of fields; or a key is unknown.
        """
        names = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        check_keys(content, names, key)
        try:
            return cls(**content)
        except InputError as error:
            first = re.split(r"\W", str(error), maxsplit=1)[0]
            raise InputError(f"{key}{'.' if first in names else ': '}{error}") from error


@cache
def type_hints(options: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, resolved."""
    return get_type_hints(options)


def converted(value: Any, kind: Any, allowed: Range) -> Any:
    """Return a value as the type of a field, or `REFUSED` if it has another type or is out of range."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        fits = [fit for member in members if (fit := converted(value, member, allowed)) is not REFUSED]
        same = (fit for fit in fits if isinstance(fit, type(value)))  # text stays text, and a path a path
        return next(same, fits[0] if fits else REFUSED)
    if origin is Literal:
        return next((item for item in members if isinstance(value, type(item)) and value == item), REFUSED)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return REFUSED
        members = members[:1] * len(value) if ... in members else members
        items = tuple(converted(item, member, allowed) for item, member in zip(value, members, strict=False))
        return REFUSED if any(item is REFUSED for item in items) or len(value) != len(members) else items
    if kind is bool:
        return bool(value) if type(value).__name__ in ("bool", "bool_") else REFUSED  # NumPy's, too
    if kind in (int, float):
        return as_number(value, kind, allowed)
    if kind is str:
        return str(value) if isinstance(value, str | PurePath) else REFUSED
    if kind is Path:
        return Path(value) if isinstance(value, str | PathLike) else REFUSED
    if kind is NoneType:
        return None if value is None else REFUSED
    return REFUSED if origin is Mapping and not isinstance(value, Mapping) else value


def as_number(value: Any, kind: type[int | float], allowed: Range) -> Any:
    """Return a number in its range as `int` or `float`, or `REFUSED` for other values, of which booleans are some."""
    if type(value).__name__ in ("bool", "bool_") or isinstance(value, str | bytes):
        return REFUSED
    try:
        number = index(value) if kind is int else float(value)
    except (TypeError, ValueError, OverflowError):  # an array of several numbers, a number that is too large
        return REFUSED
    return number if number in allowed else REFUSED


def described(kind: Any, allowed: Range) -> str:
    """Return what a field accepts, for errors: "a whole number, at least 1"."""
    origin, members = get_origin(kind), get_args(kind)
    bounds = f", {allowed}" if str(allowed) else ""
    if origin in (Union, UnionType):
        return " or ".join(described(member, allowed) for member in members if member is not NoneType)
    if origin is Literal:
        return f"one of {', '.join(map(str, members))}" if members[1:] else repr(members[0])
    if origin is tuple:
        count = "" if ... in members else f"{len(members)} "
        return f"a list of {count}numbers{bounds}" if members[0] in (int, float) else "a list"
    if kind in (int, float):
        return f"a {'whole ' * (kind is int)}number{bounds}"
    return {bool: "true or false", str: "text", Path: "a path"}.get(kind, "a mapping")


def check_keywords(function: str, keywords: Iterable[str], known: Collection[str]) -> None:
    """Raise a `TypeError` if a keyword of a function is unknown, with the closest one."""
    for name in keywords:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def check_keys(keys: Iterable[str], known: Collection[str], where: str, inner: Mapping[str, str] | None = None) -> None:
    """Refuse unknown keys.

    Args:
        keys: The keys, or a mapping.
        known: The known keys.
        where: Where the keys are, for errors.
        inner: By the name of a key in a mapping under another key: both, `conditioning.r_max`.

    Raises:
        InputError: A key is unknown. The error suggests the closest known one.
    """
    for key in keys:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(set(known)))}."
            hint = f"use {inner[key]!r}." if inner and key in inner else hint
            raise InputError(f"{where} has no key {key!r}: {hint}")


def choices(hint: Any) -> tuple[str, ...]:
    """Return the strings of a type such as `Literal["lines", "documents"]`; empty for other types."""
    values = get_args(hint) if get_origin(hint) is Literal else ()
    return values if all(isinstance(value, str) for value in values) else ()


def value_types(options: type) -> dict[str, Any]:
    """Return the type of each field, without `None`; of a union the last one: `str | Path | None` is `Path`."""
    return {name: last_type(hint) for name, hint in type_hints(options).items()}


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
