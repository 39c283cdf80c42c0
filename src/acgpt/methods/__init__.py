"""Methods: how a model is asked, one file each; `base` says what a method is, `registry` which there are.

Nothing outside this package asks which method a model has: it takes the one that `method_of` names, and asks *it*.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from acgpt.errors import InputError, ModelError
from acgpt.methods.base import Abilities, Method
from acgpt.methods.registry import METHODS, register

for module in iter_modules(__path__):  # each file of a method registers it
    import_module(f"{__name__}.{module.name}")

__all__ = ["METHODS", "Abilities", "Method", "method_of", "parted", "register"]

CAUSAL = "gpt"  # the method of a model that names none


def parted(text: str) -> tuple[str, str]:
    """The name and the value of a method's option that was written as KEY=VALUE.

    >>> parted("order=random")
    ('order', 'random')
    """
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise InputError(f"{text!r} is no option of a method: write KEY=VALUE, as in order=random.")
    return name, value


def method_of(name: str | None) -> Method:
    """The method of this name; `None`, of a model that says nothing, is a plain causal model.

    >>> method_of("ac-gpt").reads_future, method_of(None).name
    (True, 'gpt')
    """
    name = CAUSAL if name is None else name
    if name not in METHODS:
        raise ModelError(
            f"there is no method {name!r} in this version of acgpt; it has {', '.join(METHODS)}. If another package "
            "adds it, install that package."
        )
    return METHODS[name]
