"""The record of the Python API: signatures, fields, defaults and bases of all that `acgpt` exports."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import pytest
from record import check
from servers import tiny_lm

import acgpt


def type_text(annotation: Any) -> str:
    """Return an annotation as text, the same under all versions of Python."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("pathlib._local.", "pathlib.")


def lines_of(function: Any) -> list[str]:
    """Return the parameters of a function, a line each, and what it returns."""
    signature, lines, starred = inspect.signature(function), [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("*")
        starred |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        line = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            line += f": {type_text(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            line += f" = {default_text(parameter.default)}"
        lines.append(line)
    if signature.return_annotation is not signature.empty:
        lines.append(f"-> {type_text(signature.return_annotation)}")
    return [*(["async"] if inspect.iscoroutinefunction(function) else []), *lines]


def default_text(value: Any) -> str:
    """Return a default as text, without addresses of objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{item.name}={default_text(getattr(value, item.name))}" for item in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    return value.__name__ if callable(value) else repr(value)


def fields_of(kind: type) -> list[str]:
    """Return the fields of a dataclass, a line each."""
    lines = []
    for item in dataclasses.fields(kind):
        line = f"{item.name}: {type_text(item.type)}"
        if item.default is not dataclasses.MISSING:
            line += f" = {default_text(item.default)}"
        elif item.default_factory is not dataclasses.MISSING:
            line += f" = {default_text(item.default_factory)}()"
        lines.append(line)
    return lines


def class_of(kind: type) -> dict[str, Any]:
    """Return what users can do with a class: its bases, how it is made, its fields and public members."""
    entry: dict[str, Any] = {"bases": [base.__name__ for base in kind.__mro__[1:-1]]}
    if kind.__init__ is not object.__init__ and "__init__" in {name for c in own(kind) for name in vars(c)}:
        entry["init"] = lines_of(kind.__init__)
    if dataclasses.is_dataclass(kind):
        entry["fields"] = fields_of(kind)
    members = {name: member for c in reversed(own(kind)) for name, member in vars(c).items() if is_public(name)}
    for name, member in sorted(members.items()):
        if isinstance(member, property):
            entry.setdefault("properties", {})[name] = lines_of(member.fget) + ["can be set"] * bool(member.fset)
        elif isinstance(member, functools.cached_property):
            entry.setdefault("properties", {})[name] = lines_of(member.func)
        elif isinstance(member, classmethod | staticmethod):
            entry.setdefault("methods", {})[name] = [f"@{type(member).__name__}", *lines_of(member.__func__)]
        elif inspect.isfunction(member):
            entry.setdefault("methods", {})[name] = lines_of(member)
        elif not inspect.isdatadescriptor(member):
            entry.setdefault("attributes", {})[name] = default_text(member)
    return entry


def own(kind: type) -> list[type]:
    """Return the class and those of its bases that are acgpt's."""
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "acgpt"]


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__len__", "__iter__", "__getitem__", "__enter__", "__aenter__")


@pytest.mark.filterwarnings("ignore")
def test_signatures() -> None:
    public = {}
    for name in acgpt.__all__:
        value = getattr(acgpt, name)
        public[name] = class_of(value) if isinstance(value, type) else lines_of(value) if callable(value) else "text"
    check("signatures", public)


def test_attributes_of_objects() -> None:
    objects = {
        "LanguageModel": tiny_lm(),
        "Client": acgpt.Client(),
        "TemplateError": acgpt.TemplateError("a problem", "The {{cat", 4),
        "ServerError": acgpt.ServerError("a problem"),
    }
    check("attributes", {name: sorted(filter(is_public, vars(value))) for name, value in objects.items()})
