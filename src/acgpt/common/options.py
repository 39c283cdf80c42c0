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
from dataclasses import dataclass, field, fields
from operator import index
from types import UnionType
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypeVar, Union, get_args, get_origin, get_type_hints

from acgpt.errors import InputError

Form = Literal["value", "names", "list", "pairs", "adapter", "adapters", "dtype", "megabytes"]
Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)
Chosen = TypeVar("Chosen", bound="Options")
NAMED = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")  # an option as Python spells it: `limit`, `limit=3`


@dataclass(frozen=True)
class Range:
    """The numbers that an option takes.

    Args:
        minimum: Least value.
        maximum: Greatest value.
        above: All values are greater.
        below: All values are less.
        words: The range in words, where those that `str` makes do not do.
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
        """The range in words: "at least 1", "from 0 to below 1"."""
        low, least = (self.minimum, "at least") if self.above is None else (self.above, "above")
        high, most = (self.maximum, "at most") if self.below in (None, math.inf) else (self.below, "below")
        if self.words or low is None or high is None:
            bounds = [f"{word} {bound:g}" for word, bound in ((least, low), (most, high)) if bound is not None]
            return self.words or " and ".join(bounds)
        if least == "above":
            return f"above {low:g} and {most} {high:g}"
        return f"from {low:g} to {'below ' if most == 'below' else ''}{high:g}"


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
        help: One or two sentences for users; other options are named in backticks. Empty, if `python` and `shell` say
            all of it.
        default: The value where none is given. The help says what it stands for.
        factory: Makes the default, where that can be changed.
        metavar: The placeholder of the value in the command's help.
        flags: Names on the command line, if they are not `--` and the field's name.
        form: How the command line writes the value: "names" with commas, "list" as a repeated option, "pairs" as
            KEY=VALUE, repeatedly, "adapter" with "none" for no adapter, "adapters" likewise and repeatedly, with names,
            "dtype" as one of its names, "megabytes" for a number of bytes.
        python: A further sentence, on how Python writes the value.
        shell: A further sentence, on how the command line does.
        **bounds: As in `Range`.
    """
    about = {"help": help, "metavar": metavar, "flags": flags, "form": form, "range": Range(**bounds)}
    about |= {"python": python, "shell": shell}
    if factory is not None:
        return field(default_factory=factory, metadata=about)
    return field(default=default, metadata=about)


def declared(options: type, name: str, **changes: Any) -> Any:
    """Declare an option as another dataclass does, for a key that means the same.

    Args:
        options: The other dataclass.
        name: Of its field.
        **changes: `default`, or parts of the field's metadata, that are otherwise.
    """
    (there,) = (each for each in fields(options) if each.name == name)
    default = changes.pop("default", there.default)
    return field(default=default, metadata={**there.metadata, **changes})


class Options:
    """Base of dataclasses of options: checks the range of every number, and words of which there are only some.

    Raises:
        InputError: A value is outside of its range, or of another type.
    """

    def __post_init__(self) -> None:
        hints = value_types(type(self))
        for each in fields(self):  # type: ignore[arg-type]
            value, allowed, words = getattr(self, each.name), each.metadata["range"], choices(hints[each.name])
            if value is None:
                continue
            if words and value not in words:
                raise InputError(f"{each.name} must be one of {', '.join(words)}, not {value!r}.")
            if allowed == Range():
                continue
            whole = hints[each.name] is int
            fits = not isinstance(value, bool) and isinstance(value, SupportsIndex if whole else SupportsFloat)
            if not fits or (number := index(value) if whole else float(value)) not in allowed:
                raise InputError(f"{each.name} must be a {'whole ' * whole}number, {allowed}, not {value!r}.")
            if type(value) not in (int, float):  # NumPy's numbers cannot be written as JSON
                object.__setattr__(self, each.name, number)


def choices(hint: Any) -> tuple[str, ...]:
    """The words of a type that is one of some words, `Literal["lines", "documents"]`; of other types none."""
    words = get_args(hint) if get_origin(hint) is Literal else ()
    return words if all(isinstance(word, str) for word in words) else ()


def value_types(options: type) -> dict[str, Any]:
    """The type of each field without `None`; of several, the last: `str | Path | None` is `Path`."""
    return {name: last_type(hint) for name, hint in get_type_hints(options).items()}


def last_type(hint: Any) -> Any:
    """The last type of a union that is not `None`, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        return [each for each in get_args(hint) if each is not type(None)][-1]
    return hint


def documented(options: Class) -> Class:
    """Add the fields of a dataclass to its docstring, as the section Args."""
    if options.__doc__:
        options.__doc__ = "\n".join([options.__doc__.rstrip(), "", "    Args:", *argument_lines(options), "    "])
    return options


def keywords(options: type[Options]) -> Callable[[Function], Function]:
    """Document the `**keywords` of a function as the fields of a dataclass, in its signature and its docstring.

    The docstring has a line `**keywords: …` in its section Args, in whose place the fields are listed. Fields that are
    parameters of the function keep their place in the signature. A `**` parameter of another name takes keywords that
    are no fields too, and is kept.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.name != "keywords"]
        added = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(options)  # type: ignore[arg-type]
            if each.name not in signature.parameters
        ]
        last = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        positional = [each for each in own if each.kind not in last]
        rest = [each for each in own if each.kind in last]
        function.__signature__ = signature.replace(parameters=[*positional, *added, *rest])  # type: ignore[attr-defined]
        if function.__doc__:
            lines = "\n".join(argument_lines(options))
            function.__doc__ = re.sub(r"^ +\*\*keywords:.*$", lambda _: lines, function.__doc__, flags=re.MULTILINE)
        return function

    return decorate


def separated(options: type[Chosen], keywords: Mapping[str, Any]) -> tuple[Chosen, dict[str, Any]]:
    """The keywords that are fields of a dataclass, as an object of it, and all others."""
    names = {each.name for each in fields(options)}  # type: ignore[arg-type]
    others = {name: value for name, value in keywords.items() if name not in names}
    return options(**{name: value for name, value in keywords.items() if name in names}), others


def argument_lines(options: type) -> list[str]:
    """The fields as lines of a docstring's section Args."""
    found = []
    for each in fields(options):
        text = f"{each.name}: {sentences(each.metadata['help'], each.metadata['python'])}"
        found += textwrap.wrap(text, 112, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    return found


def flags_of(options: type) -> dict[str, tuple[str, ...]]:
    """The names on the command line of each field."""
    return {each.name: each.metadata["flags"] or (f"--{each.name.replace('_', '-')}",) for each in fields(options)}


def command_help(options: type) -> dict[str, str]:
    """The help of each field on the command line, with options named as it spells them."""
    names = {name: flags[0] for name, flags in flags_of(options).items()}
    return {
        each.name: spelled(sentences(each.metadata["help"], each.metadata["shell"]), names) for each in fields(options)
    }


def sentences(*parts: str) -> str:
    """These parts of a text, those that are not empty, with spaces between them."""
    return " ".join(filter(None, parts))


def spelled(text: str, flags: Mapping[str, str]) -> str:
    """Write the options that a text names in backticks as the command line spells them.

    >>> flags = {"r_max": "--r-max", "if_possible": "--if-possible"}
    >>> spelled("leave out `r_max=0.5`, or add `if_possible=True`.", flags)
    'leave out --r-max 0.5, or add --if-possible.'
    >>> spelled("`future=False`, `adapter=False`", {"future": "--future/--no-future", "adapter": "--adapter"})
    '--no-future, --adapter none'

    Args:
        text: A help text or an error.
        flags: The name on the command line by the name in Python, with that for false after a slash; what is not among
            them stays as it is.
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
