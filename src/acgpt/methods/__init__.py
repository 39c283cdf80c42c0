"""Methods: how a model is asked, one file each; `base` says what a method is.

Nothing outside this package asks which method a model has: it takes the one that `method_of` names, and asks *it*.
"""

from __future__ import annotations

from acgpt.errors import InputError, ModelError
from acgpt.methods.ac_gpt import AcGpt
from acgpt.methods.base import Abilities, Method
from acgpt.methods.diffusion import Diffusion
from acgpt.methods.fim import Fim
from acgpt.methods.gpt import Gpt
from acgpt.methods.mlm import Mlm
from acgpt.methods.sigma_gpt import SigmaGptRandom, SigmaGptTemporal

METHODS: dict[str, Method] = {
    method.name: method for method in (AcGpt(), Gpt(), SigmaGptTemporal(), SigmaGptRandom(), Mlm(), Diffusion(), Fim())
}

__all__ = [
    "METHODS",
    "Abilities",
    "AcGpt",
    "Diffusion",
    "Fim",
    "Gpt",
    "Method",
    "Mlm",
    "SigmaGptRandom",
    "SigmaGptTemporal",
    "method_of",
    "parted",
]


def parted(text: str) -> tuple[str, str]:
    """The name and the value of a method's option that was written as KEY=VALUE.

    >>> parted("order=random")
    ('order', 'random')
    """
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise InputError(f"--how {text} is no option of a method: write KEY=VALUE, as in --how order=random.")
    return name, value


def method_of(name: str | None) -> Method:
    """The method of this name; `None`, of a model that says nothing, is a plain causal model.

    >>> method_of("ac-gpt").reads_future, method_of(None).name
    (True, 'gpt')
    """
    name = Gpt.name if name is None else name
    if name not in METHODS:
        raise ModelError(f"there is no method {name!r} in this version of acgpt; it has {', '.join(METHODS)}.")
    return METHODS[name]
