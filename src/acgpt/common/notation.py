"""YAML as recipes, experiments and options write it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from acgpt.errors import InputError

FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")  # 5e-4 and 1.5e0: text for YAML 1.1


class Loader(yaml.SafeLoader):
    """A safe YAML loader that rejects duplicate keys, and reads 5e-4 as a number, as YAML 1.2 does."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping and check that its keys differ."""
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def read_notation(text: str, what: str) -> Any:
    """Return the value of a text in YAML.

    Args:
        text: The text.
        what: What it is, for errors.

    Raises:
        InputError: The text is not valid YAML.
    """
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise InputError(f"{what} is not valid YAML: {error}") from error
