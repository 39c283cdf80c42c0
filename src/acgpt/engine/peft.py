"""Everything that depends on PEFT: adapters are created, loaded, inspected and switched here.

The peft package is optional. It is imported only by functions that create, load or unwrap an adapter.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import ModuleDict
from transformers import PreTrainedModel

from acgpt.engine.modules import listed, modules_of, turn, turn_of
from acgpt.errors import InputError, ModelError

DEFAULT = "default"  # PEFT's name for an adapter that was given none
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in the order in which PEFT looks for them
NARROW = 700  # in · out / (in + out) of layers for `join_products`; from the rates of an H200, for bf16


# ---- layers ----------------------------------------------------------------------------------------------------------


def adapter_layers(model: PreTrainedModel) -> list[Any]:
    """Return the layers that carry adapters."""
    flag = "_disable_adapters"  # of the layer or of its class; works where peft is not installed
    return [module for module in modules_of(model) if flag in vars(module) or hasattr(type(module), flag)]


def adapters_at_work(layers: Sequence[Any]) -> tuple[object, ...]:
    """Return which adapters are active and merged in each of the `adapter_layers`: the key of a captured step."""
    # The attributes that PEFT's properties read: this is computed for every step.
    states = [(layer._disable_adapters, layer._active_adapter, layer.merged_adapters) for layer in layers]
    return tuple(
        [
            (disabled, (active,) if isinstance(active, str) else (*active,), (*merged,))
            for disabled, active, merged in states
        ]
    )


def active_adapter(model: PreTrainedModel) -> str | None:
    """Return the name of the adapter that is active outside of switches; `None` if there is none.

    It does not wait for the thread that uses the network, which may have switched adapters for the moment.
    """
    shared = turn_of(model)
    while True:
        switches, states = shared.switches, shared.resting
        if states is None:
            states = [(layer._active_adapter, layer._disable_adapters) for layer in adapter_layers(model)]
        if shared.switches == switches:
            break
    for active, disabled in states:
        if not disabled and (names := [active] if isinstance(active, str) else list(active)):
            return "+".join(names)
    return None


class Switch:
    """Switches the adapters of a model, and remembers which layers have which.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.structure: object = None  # what `layers` and `having` were found in
        self.layers: list[Any] = []
        self.having: dict[str, list[bool]] = {}  # by adapter: which of the layers have weights of it

    def refresh(self) -> None:
        """Look for the layers again if modules or parameters were added or removed."""
        structure = modules_of(self.model), list(map(tuple, listed(self.model).parameters))
        if structure != self.structure:
            self.structure, self.layers, self.having = structure, adapter_layers(self.model), {}

    @contextmanager
    def to(self, name: str | None, *, same_layers: bool = False) -> Iterator[None]:
        """Activate one adapter, or none, inside the context; restore every layer afterwards.

        PEFT's own `set_adapter` also changes `requires_grad`, and the model may be in training.

        Args:
            name: The adapter.
            same_layers: The layers are known to be those of the last call: a step of decoding does not look again.
        """
        with turn(self.model) as shared:
            if not same_layers or self.structure is None:
                self.refresh()
            if any(layer.merged_adapters for layer in self.layers):
                raise ModelError(
                    "an adapter is merged into the weights, so adapters cannot be switched: call unmerge_adapter() "
                    "first."
                )
            layers = self.layers
            before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
            # A layer without weights of this adapter is switched off: it computes what the bare model computes.
            after = [([name], False) if here else ([], True) for here in self.layers_with(name)]
            outermost = shared.resting is None
            if outermost:
                shared.resting = before
            try:
                shared.switches += 1
                set_adapters(layers, after)
                yield
            finally:
                set_adapters(layers, before)
                shared.switches += 1
                if outermost:
                    shared.resting = None

    def layers_with(self, name: str | None) -> list[bool]:
        """Return whether each of the layers has weights of an adapter."""
        if name is None:
            return [False] * len(self.layers)
        if name not in self.having:
            self.having[name] = [
                any(name in key.split(".") for key, _ in layer.named_parameters()) for layer in self.layers
            ]
        return self.having[name]


def switched(model: PreTrainedModel, name: str | None) -> AbstractContextManager[None]:
    """Activate one adapter, or none, inside the context, see `Switch.to`."""
    return Switch(model).to(name)


def set_adapters(layers: Sequence[Any], states: Sequence[tuple[Any, bool]]) -> None:
    """Set the active adapters of layers, and whether these are disabled; without the checks of `Module.__setattr__`."""
    for layer, (active, disabled) in zip(layers, states, strict=True):
        object.__setattr__(layer, "_active_adapter", active)
        object.__setattr__(layer, "_disable_adapters", disabled)


def adapter_scales(layers: Sequence[Any]) -> list[str]:
    """Return the scaling factors of each of the `adapter_layers` as text, to identify the model's state."""
    return [str(getattr(layer, "scaling", None)) for layer in layers]


# ---- models with adapters --------------------------------------------------------------------------------------------


def is_reserved(name: str) -> bool:
    """Return whether PEFT cannot store an adapter under this name: it keeps them in a `ModuleDict`."""
    return name in dir(ModuleDict())


def unwrap(model: Any) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Return the Hugging Face model, whose layers hold the adapters, and the names of the adapters.

    Raises:
        ModelError: The model is of another kind, or its adapters cannot be used here.
    """
    if isinstance(model, PreTrainedModel):
        return model, ()
    try:
        from peft import PeftModel
    except ImportError:
        PeftModel = None
    if PeftModel is None or not isinstance(model, PeftModel):
        raise ModelError(f"expected a causal language model of transformers or peft, not {type(model).__name__}.")
    for config in model.peft_config.values():
        check_kind(config)
    if len(model.peft_config) > 1 and trains_biases(model):
        raise ModelError(
            "one of several adapters has trained the backbone's own biases, which cannot be switched with it: use it "
            'alone, or train it with bias="none".'
        )
    return model.get_base_model(), tuple(model.peft_config)


def check_kind(config: Any) -> None:
    """Refuse the config of an adapter that shifts positions."""
    if config.is_prompt_learning:
        raise ModelError(
            f"the adapter is of type {config.peft_type}, which adds virtual tokens to the text; only adapters "
            "inside the layers (LoRA and the like) leave positions as they are."
        )


def trains_biases(model: Any) -> bool:
    """Return whether an adapter trained biases of the base model; these stay when the adapter is switched off."""
    configs = [] if isinstance(model, PreTrainedModel) else model.peft_config.values()
    return any(config.to_dict().get("bias", "none") != "none" for config in configs)


# ---- creating and loading --------------------------------------------------------------------------------------------


def require(purpose: str, remedy: str = "pip install 'acgpt[peft]'") -> None:
    """Raise an error that says what needs peft, if it is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{purpose} needs the package peft: {remedy}") from error


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: Sequence[str] | None = None,
    seed: int = 0,
) -> tuple[PreTrainedModel, Any]:
    """Add a new LoRA adapter to a model and freeze the other weights. Untrained, it does not change the outputs.

    Args:
        model: The base model. Its layers are replaced in place.
        rank: Rank of the added matrices.
        alpha: The matrices are scaled by alpha / rank.
        dropout: Dropout on the adapter's input.
        targets: Names of the modules to adapt. Default: every linear layer of the blocks.
        seed: Seed of the adapter's initial weights.

    Returns:
        The model, and PEFT's config of the adapter.
    """
    require("LoRA")
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=alpha, lora_dropout=dropout,
        target_modules="all-linear" if targets is None else list(targets), inference_mode=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise InputError(f"lora.targets={targets}: {error}") from error
    return unwrap(adapted)[0], adapted.peft_config[DEFAULT]


def join_products(model: PreTrainedModel) -> int:
    """Let LoRA layers multiply by W + s·B·A while gradients are recorded: one product with the sum instead of three.

    The result is the same up to rounding. The gradient of the sum is a product more, but a product with a narrow matrix
    takes as long as reading the wide one, and three results need not be added. This is faster for narrow layers only,
    and only these are changed. Layers with dropout, with quantised weights or of another kind are left as they are.

    Returns:
        Number of layers that were changed.
    """
    layers = [layer for layer in adapter_layers(model) if is_plain_lora(layer) and is_narrow(layer)]
    for layer in layers:
        layer.__class__ = joined_class()
    return len(layers)


def is_plain_lora(layer: Any) -> bool:
    """Return whether a layer is a linear one with one LoRA adapter, without dropout and without additions to LoRA."""
    from peft.tuners.lora import Linear

    if type(layer) is not Linear or list(layer.lora_A) != list(layer.active_adapters) or len(layer.lora_A) != 1:
        return False
    plain = type(layer.get_base_layer()) is torch.nn.Linear and not layer.fan_in_fan_out and not layer.lora_variant
    no_dropout = all(isinstance(dropout, torch.nn.Identity) for dropout in layer.lora_dropout.values())
    return plain and no_dropout and not any(layer.lora_bias.values())


def is_narrow(layer: Any) -> bool:
    """Return whether the gradient of a layer's whole matrix takes less time than the products of LoRA save.

    It takes in · out steps of arithmetic per token, and they move in + out numbers, so the ratio decides.
    """
    inputs, outputs = int(layer.in_features), int(layer.out_features)
    return inputs * outputs / (inputs + outputs) <= NARROW


@cache
def joined_class() -> Any:
    """Return a subclass of PEFT's linear LoRA layer for `join_products`."""
    from peft.tuners.lora import Linear

    class Joined(Linear):  # type: ignore[misc, unused-ignore]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.disable_adapters or self.merged or args or kwargs or not torch.is_grad_enabled():
                result: Tensor = super().forward(x, *args, **kwargs)
                return result
            (name,) = self.active_adapters
            base, dtype = self.get_base_layer(), x.dtype
            if torch.is_autocast_enabled(x.device.type):
                dtype = torch.get_autocast_dtype(x.device.type)
            weight, down, up = (w.to(dtype) for w in (base.weight, self.lora_A[name].weight, self.lora_B[name].weight))
            return F.linear(x.to(dtype), torch.addmm(weight, up, down, alpha=self.scaling[name]), base.bias)

    return Joined


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings that PEFT causes while it wraps a model and that its user can do nothing about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")  # GPT-2's layers: PEFT corrects it itself
        # PEFT reads an attribute that transformers 5.2x has renamed:
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def load_adapter(model: Any, source: str, name: str, *, known: bool = False) -> tuple[Any, list[str], list[str]]:
    """Load an adapter onto a model.

    Args:
        model: The base model, or what an earlier call returned.
        source: Folder or hub id of the adapter.
        name: Name to give to the adapter.
        known: The file is known to hold all weights of the adapter, and the model is in float32: the adapter is not
            initialised at random first, nor searched for weights of other dtypes.

    Returns:
        The model with the adapter, the weights of the adapter that the file lacks, and the weights of the file that
        the model has no place for.
    """
    from peft import PeftConfig, PeftModel

    without_start: AbstractContextManager[None] = nullcontext()
    if known:
        from transformers.initialization import no_init_weights

        without_start = no_init_weights()
    with quiet(), without_start:
        if isinstance(model, PreTrainedModel):  # not by PeftModel.from_pretrained, which does not report the weights
            config = PeftConfig.from_pretrained(source)
            check_kind(config)
            config.inference_mode = True
            model = PeftModel(model, config, name, autocast_adapter_dtype=not known)
        report = model.load_adapter(source, name, autocast_adapter_dtype=not known)
    missing = [key for key in report.missing_keys if name in key.split(".")]
    return model, missing, list(report.unexpected_keys)


def merge_adapter(model: Any) -> PreTrainedModel:
    """Merge the adapter of a PEFT model into the weights, and return the Hugging Face model.

    Raises:
        ModelError: PEFT cannot merge adapters of this kind.
    """
    try:
        merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
        raise ModelError(f"it is of a kind that cannot be merged: {error}") from error
    return merged


def adapter_shapes(folder: Path, network: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's weights on a model, without allocating them.

    Args:
        folder: Folder with the adapter's config.
        network: The base model.

    Returns:
        Shapes by name; empty if PEFT cannot build this kind on the meta device.
    """
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict

    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = PeftConfig.from_pretrained(str(folder))
            check_kind(config)
            config.inference_mode = True
            for name in ("init_lora_weights", "init_weights"):
                if hasattr(config, name):
                    setattr(config, name, False)  # some initialisations read the weights of the model
            adapted = get_peft_model(type(network)(copy.deepcopy(network.config)), config)
            weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    except ModelError:
        raise
    except Exception:
        return {}
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def file_name(weight: str) -> str:
    """Return the name under which PEFT's files hold a weight of a model with one adapter.

    >>> file_name("model.layers.0.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.q_proj.lora_A.weight'
    """
    return "base_model.model." + weight.replace(f".{DEFAULT}", "")
