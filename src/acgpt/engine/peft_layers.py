"""The layers of PEFT adapters inside a model: which are at work, and how they are switched.

All that relies on how PEFT builds its layers is here; peft itself need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from acgpt.errors import ModelError


def adapter_layers(model: PreTrainedModel) -> list[Any]:
    """The layers that carry PEFT adapters; none if there are no adapters."""
    flag = "_disable_adapters"  # of each such layer, or of its class; peft itself need not be installed
    return [module for module in model.modules() if flag in vars(module) or hasattr(type(module), flag)]


def adapters_at_work(model: PreTrainedModel) -> tuple[object, ...]:
    """Which adapters are switched on, and which are merged, layer by layer: a step is captured for each such state."""
    return tuple(
        (layer.disable_adapters, tuple(layer.active_adapters), tuple(layer.merged_adapters))
        for layer in adapter_layers(model)
    )


def active_adapter(model: PreTrainedModel) -> str | None:
    """The adapter at work in a model as it stands; `None` if there is none, or all are switched off."""
    for layer in adapter_layers(model):
        if not layer.disable_adapters and (names := list(layer.active_adapters)):
            return "+".join(names)
    return None


@contextmanager
def switched(model: PreTrainedModel, name: str | None) -> Iterator[None]:
    """Within, this adapter alone is at work, or none; then every layer is as it was, whatever happened.

    PEFT's own `set_adapter` would also change which weights want gradients, and these may be a user's, in training.
    """
    layers = adapter_layers(model)
    if any(layer.merged_adapters for layer in layers):
        raise ModelError(
            "an adapter is merged into the weights, so adapters cannot be switched: call unmerge_adapter() first."
        )
    before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:
            # A layer that the adapter does not touch is switched off: it does what it did before there were adapters.
            here = name is not None and any(name in key.split(".") for key, _ in layer.named_parameters())
            layer._active_adapter, layer._disable_adapters = [name] if here else [], not here
        yield
    finally:
        for layer, active, disabled in before:
            layer._active_adapter, layer._disable_adapters = active, disabled
