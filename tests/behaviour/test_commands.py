"""The record of the command line: every command, its arguments and its options."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

import typer.main
from record import check

from acgpt.cli.main import app


def text_of(value: Any) -> Any:
    """Return a default in a form that JSON has."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [text_of(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def parameter_of(parameter: Any) -> dict[str, Any]:
    """Return an argument or an option."""
    kind = parameter.type_descriptor.annotation
    entry = {
        "kind": parameter.param_type_name,
        "names": [*parameter.opts, *parameter.secondary_opts],
        "type": "choice" if issubclass(kind, Enum) else kind.__name__,
        "metavar": parameter.metavar,
        "default": text_of(parameter.default),
        "required": parameter.required,
        "several": bool(parameter.multiple) or parameter.nargs != 1,
        "flag": bool(getattr(parameter, "is_flag", False)),
        "hidden": bool(getattr(parameter, "hidden", False)),
        "help": getattr(parameter, "help", None),
    }
    if issubclass(kind, Enum):
        entry["choices"] = [choice.value for choice in kind]
    entry |= {bound: number for bound in ("min", "max") if (number := getattr(parameter, bound)) is not None}
    return {
        key: value for key, value in entry.items() if (value is not None and value is not False) or key == "default"
    }


def commands_of(command: Any, path: str = "acgpt") -> dict[str, Any]:
    """Return every command by the words that call it."""
    commands = {
        path: {
            "help": inspect.cleandoc(command.help or "").splitlines(),
            "parameters": {item.name: parameter_of(item) for item in command.params},
        }
    }
    for name, inner in getattr(command, "commands", {}).items():
        commands |= commands_of(inner, f"{path} {name}")
    return commands


def test_commands_and_options() -> None:
    check("commands", commands_of(typer.main.get_command(app)))
