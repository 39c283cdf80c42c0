"""Methods: how a model is trained and how it answers queries. One file per method.

`base` defines the interface, `registry` holds the methods by name. Code outside this package does not depend on
particular methods: it gets one from `method_of` and calls its interface.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules

from acgpt.errors import InputError, ModelError
from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import METHODS, register

# Modules that methods import when they need them. Those of networks register classes with transformers.
SUPPORT = ("masked", "sigma_network")
for module in iter_modules(__path__):  # each file of a method registers it; none of them imports torch
    if module.name not in SUPPORT:
        import_module(f"{__name__}.{module.name}")

__all__ = ["METHODS", "Abilities", "Method", "import_networks", "method_of", "register", "split_option"]

CAUSAL = "gpt"  # the method of a model that names none


def import_networks() -> None:
    """Register the networks of this package with transformers, so that their checkpoints can be loaded."""
    for name in SUPPORT:
        import_module(f"{__name__}.{name}")


def split_option(text: str) -> tuple[str, str]:
    """Split an option of a method, KEY=VALUE, into name and value.

    >>> split_option("order=random")
    ('order', 'random')
    """
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise InputError(f"{text!r} is not an option of a method: write KEY=VALUE, as in order=random.")
    return name, value


def method_of(name: str | None) -> Method:
    """Return the method with a name; `None`, for a model without metadata, is the plain causal model.

    >>> method_of("ac-gpt").reads_future, method_of(None).name
    (True, 'gpt')
    """
    name = CAUSAL if name is None else name
    if name not in METHODS:
        similar = get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        raise ModelError(
            f"there is no method {name!r}: {hint}This version of acgpt has {', '.join(METHODS)}. If another package "
            "adds it, install that package."
        )
    return METHODS[name]
