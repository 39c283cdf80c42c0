"""Several PEFT adapters on one frozen backbone: what each says it is for, and how the model is switched to it.

Which of them answers a query is decided in `router`. What depends on PEFT is in `engine.peft`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from acgpt.engine.peft import is_reserved, unwrap
from acgpt.errors import InputError, ModelError
from acgpt.models.metadata import Metadata
from acgpt.query.conditioning import Blocks, Conditioning, Empty, Infilling

BARE = "none"  # the backbone without any adapter, where a name is wanted
MODES = {
    "infill": Infilling.kind,
    "infilling": Infilling.kind,
    "scattered": Blocks.kind,
    "blocks": Blocks.kind,
}

Choice = str | Literal[False] | None  # an adapter's name; False or "none": the backbone; None: not chosen


@dataclass(frozen=True)
class Adapter:
    """One adapter, and what it says it can do.

    Args:
        name: Its name in the PEFT model.
        mode: What it is for, "blocks" or "infilling"; `None` if it was never given anything in training.
        metadata: Its `acgpt.json`; what that leaves open of BOS and MASK is as the backbone says.
    """

    name: str
    mode: str | None
    metadata: Metadata | None

    @classmethod
    def of(cls, name: str, metadata: Metadata | None) -> Adapter:
        """The adapter of this name, which says this."""
        return cls(name, MODES.get(name) or mode_of(metadata), metadata)

    @property
    def reads_copies(self) -> bool:
        """Does it say that it can be shown copies, and so read what stands after a blank?"""
        return self.metadata is not None and self.metadata.reads_copies

    @property
    def conditioning(self) -> dict[str, Any] | None:
        """The conditioning sets that it was trained on, if it says so."""
        return None if self.metadata is None else self.metadata.conditioning


def mode_of(metadata: Metadata | None) -> str | None:
    """The kind of conditioning sets that most training texts with anything given had; blocks if nothing is said.

    >>> mode_of(Metadata(conditioning={"parts": [{"kind": "infilling", "weight": 3}, {"kind": "blocks"}]}))
    'infilling'
    """
    try:
        conditioning = Conditioning.from_dict((metadata and metadata.conditioning) or {})
    except InputError:  # written by hand, or by a program with another idea of it: it says nothing to us
        return Blocks.kind
    weights = {Blocks.kind: 0.0, Infilling.kind: 0.0}  # the first wins a tie
    for part, weight in zip(conditioning.parts, conditioning.weights, strict=True):
        if not isinstance(part, Empty):
            weights[part.kind] += weight
    mode = max(weights, key=lambda kind: weights[kind])
    return mode if weights[mode] > 0 else None


# ---- what a model has -----------------------------------------------------------------------------------------------


def check_name(name: object) -> None:
    """Refuse a name, to be given to an adapter, that PEFT or a reader of results would take for something else."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise InputError(f"an adapter's name is made of letters, digits, - and _, not {name!r}.")
    if name == BARE:
        raise InputError(f"no adapter can be called {BARE!r}: that stands for the model without any.")
    if is_reserved(name):
        raise InputError(f"no adapter can be called {name!r}: PEFT has another use for that name.")


def unwrapped(model: Any) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Return the Hugging Face model inside a PEFT model and the names of its adapters; see `peft.unwrap`."""
    network, names = unwrap(model)
    for name in names:
        if name == BARE or "+" in name:
            raise InputError(f"an adapter called {name!r} could not be told from {BARE!r} or from two: rename it.")
    return network, names


def statements(
    metadata: Metadata | Mapping[str, Metadata | None] | None, names: tuple[str, ...], config: Metadata | None
) -> dict[str, Metadata | None]:
    """What the backbone (under the name "none") and each adapter say they can do.

    Args:
        metadata: As in `LanguageModel`.
        names: The model's adapters.
        config: What the model's config says.
    """
    if not isinstance(metadata, Mapping):
        metadata = dict.fromkeys(names or (BARE,), metadata)
    if strange := [name for name in metadata if name not in (*names, BARE)]:
        raise InputError(f"metadata names {strange[0]!r}, {unknown_name(names)}")
    backbone = metadata.get(BARE) or config
    said: dict[str, Metadata | None] = {BARE: backbone}
    for name in names:
        own = metadata.get(name)
        said[name] = backbone if own is None else own.over(backbone)
    return said


def unknown_name(names: tuple[str, ...]) -> str:
    """The end of an error that names an adapter that is not there."""
    return f"but the model's adapters are {', '.join(names)}." if names else "but the model has no adapters."


def agreed_bos(adapters: Mapping[str, Adapter]) -> int | None:
    """The BOS that the adapters were trained with: one for all, or an error."""
    stated = {a.name: a.metadata.bos_token_id for a in adapters.values() if a.metadata is not None}
    stated = {name: bos for name, bos in stated.items() if bos is not None}
    if len(set(stated.values())) > 1:
        each = ", ".join(f"{name}: {bos}" for name, bos in stated.items())
        raise ModelError(
            f"the adapters were trained with different beginning-of-sequence tokens ({each}): load each alone, or name "
            "one token for all with bos=…."
        )
    return next(iter(stated.values()), None)
