"""PEFT adapters on one frozen base model: their names, modes and metadata.

`router` chooses the adapter for a query. Code that depends on PEFT is in `engine.peft`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from acgpt.engine.peft import is_reserved, unwrap
from acgpt.errors import InputError, ModelError
from acgpt.models.metadata import Metadata
from acgpt.query.conditioning import Blocks, Conditioning, Empty, Gaps, Infilling

BARE = "none"  # name of the base model without an adapter
MODES = {  # by adapter name
    "infill": Infilling.kind,
    "infilling": Infilling.kind,
    "scattered": Blocks.kind,
    "blocks": Blocks.kind,
}


@dataclass(frozen=True)
class Adapter:
    """An adapter and its metadata.

    Args:
        name: Its name in the PEFT model.
        mode: The kind of conditioning sets it is meant for, "blocks" or "infilling"; `None` if its training texts had
            no given tokens.
        metadata: Contents of its `acgpt.json`, with BOS and MASK of the base model where it has none.
    """

    name: str
    mode: str | None
    metadata: Metadata | None

    @classmethod
    def of(cls, name: str, metadata: Metadata | None) -> Adapter:
        """Create an adapter. Its name determines the mode if it is the name of one, else its metadata do."""
        return cls(name, MODES.get(name) or mode_of(metadata), metadata)

    @property
    def reads_copies(self) -> bool:
        """Whether it was trained on copies of given tokens, and so reads what comes after a slot."""
        return self.metadata is not None and self.metadata.reads_copies

    @property
    def conditioning(self) -> dict[str, Any] | None:
        """The distribution of conditioning sets it was trained on, if its metadata have one."""
        return None if self.metadata is None else self.metadata.conditioning


def mode_of(metadata: Metadata | None) -> str | None:
    """Return the most frequent kind of conditioning sets in training, empty ones aside.

    It is blocks if the metadata do not say, and `None` if all conditioning sets were empty.

    >>> mode_of(Metadata(conditioning={"parts": [{"kind": "infilling", "weight": 3}, {"kind": "blocks"}]}))
    'infilling'
    """
    try:
        conditioning = Conditioning.from_dict((metadata and metadata.conditioning) or {})
    except InputError:  # not a conditioning of ours: written by hand or by another program
        return Blocks.kind
    weights = {Blocks.kind: 0.0, Infilling.kind: 0.0}  # the first wins a tie
    for part, weight in zip(conditioning.parts, conditioning.weights, strict=True):
        if not isinstance(part, Empty):  # gaps are what is filled in, be it one or several
            weights[Infilling.kind if isinstance(part, Gaps) else part.kind] += weight
    mode = max(weights, key=lambda kind: weights[kind])
    return mode if weights[mode] > 0 else None


# ---- names and metadata ---------------------------------------------------------------------------------------------


def check_name(name: object) -> None:
    """Refuse an adapter name that is malformed, or that PEFT or acgpt use for something else."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise InputError(f"an adapter name must consist of letters, digits, - and _, not {name!r}.")
    if name == BARE:
        raise InputError(f"an adapter cannot be called {BARE!r}, which means the model without an adapter.")
    if is_reserved(name):
        raise InputError(f"an adapter cannot be called {name!r}, which PEFT reserves. Choose another name.")


def unwrap_named(model: Any) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Return the Hugging Face model inside a PEFT model and the names of its adapters, after a check of the names.

    See `engine.peft.unwrap`.
    """
    network, names = unwrap(model)
    for name in names:
        if name == BARE or "+" in name:
            raise InputError(
                f"the adapter {name!r} has a name with another meaning: {BARE!r} is no adapter, + joins several. "
                "Rename it."
            )
    return network, names


def metadata_by_name(
    metadata: Metadata | Mapping[str, Metadata | None] | None, names: tuple[str, ...], config: Metadata | None
) -> dict[str, Metadata | None]:
    """Return the metadata of the base model (under the name "none") and of each adapter.

    Args:
        metadata: The argument of `LanguageModel`.
        names: Names of the model's adapters.
        config: Metadata in the model's config, used if `metadata` has none for the base model.
    """
    if not isinstance(metadata, Mapping):
        metadata = dict.fromkeys(names or (BARE,), metadata)
    if unknown := [name for name in metadata if name not in (*names, BARE)]:
        raise InputError(f"metadata names {unknown[0]!r}, {unknown_name(names)}")
    base = metadata.get(BARE) or config
    by_name: dict[str, Metadata | None] = {BARE: base}
    for name in names:
        own = metadata.get(name)
        by_name[name] = base if own is None else own.over(base)
    return by_name


def unknown_name(names: tuple[str, ...]) -> str:
    """Return the end of an error about an unknown adapter name."""
    return f"but the model's adapters are {', '.join(names)}." if names else "but the model has no adapters."


def common_bos(adapters: Mapping[str, Adapter]) -> int | None:
    """Return the id of the BOS token that the adapters were trained with; `None` if no metadata name one.

    Raises:
        ModelError: They were trained with different ones.
    """
    tokens = {
        name: adapter.metadata.bos_token_id
        for name, adapter in adapters.items()
        if adapter.metadata is not None and adapter.metadata.bos_token_id is not None
    }
    if len(set(tokens.values())) > 1:
        listed = ", ".join(f"{name}: {bos}" for name, bos in tokens.items())
        raise ModelError(
            f"the adapters were trained with different BOS tokens ({listed}). Load them one at a time, or choose one "
            "token with bos=…."
        )
    return next(iter(tokens.values()), None)
