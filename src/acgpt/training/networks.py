"""The network of a run: new, or pretrained and tuned, in all its weights or through an adapter.

    Tuned      all weights, new ones or those of a pretrained model; the vocabulary of a new network is padded in
               training, and written without the padding
    Adapted    a LoRA adapter on a frozen model; only the adapter is trained and written

The classes differ only in what is trained, what a checkpoint holds and what is written in the end.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from acgpt.common.files import copy_config_permissions
from acgpt.engine import peft
from acgpt.engine.architecture import check_model
from acgpt.engine.attention import head_width
from acgpt.engine.length_head import FILE as HEAD_FILE
from acgpt.engine.length_head import LengthHead
from acgpt.engine.peft import add_lora
from acgpt.errors import InputError, ModelError, reason
from acgpt.methods import METHODS, Method, method_of
from acgpt.models.checkpoint import check_finite
from acgpt.models.language_model import LanguageModel, positions_of
from acgpt.models.loading import (
    DEFAULT_ADAPTER,
    default_bos,
    from_pretrained,
    load_base,
    read_metadata,
    resolve_base,
)
from acgpt.models.metadata import (
    ADAPTER_CONFIG,
    DEFAULT,
    DEFAULT_HUB_ID,
    Metadata,
    choose_bos,
    token_id,
    tokenizer_hash,
    weights_hash,
)
from acgpt.training.learner import VOCABULARY_ALIGN, new_model
from acgpt.training.plan import Plan
from acgpt.training.recipe import Recipe

WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", peft.WEIGHTS[0]
HEAD = "length_head."  # prefix of the head's weights in a `Learner`


class Tuned:
    """A network all of whose weights are trained.

    Args:
        model: The network.
        tokenizer: Its tokenizer, written with it.
        metadata: Contents of its acgpt.json.
        dtype: Data type of the final weights. A checkpoint holds them as they are trained.
        base: Public name of the pretrained model; empty if there is none.
        vocabulary: Number of tokens it predicts, if fewer than it has logits in training.

    Attributes:
        length_head: The head for lengths of gaps, if the metadata name one. It is trained and written with the network.
        files: The weights of a checkpoint, one for each group of tied weights. By file: by the name in the file, the
            name in a `Learner`, without "model.".
        kept: The names in a `Learner`.
    """

    folder = "model"  # subfolder of the run for the final model

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        metadata: Metadata,
        dtype: torch.dtype,
        base: str = "",
        vocabulary: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.metadata, self.dtype, self.base = model, tokenizer, metadata, dtype, base
        self.vocabulary, self.files = vocabulary, self.network_file()
        self.length_head: LengthHead | None = None
        if metadata.lengths is not None:
            width = model.get_output_embeddings().weight.shape[1]
            self.length_head = LengthHead(width, metadata.lengths["distance"]).to(model.device)
            self.files[HEAD_FILE] = {name: f"{HEAD}{name}" for name in self.length_head.state_dict()}
        self.kept = {name for names in self.files.values() for name in names.values()}

    def network_file(self) -> dict[str, dict[str, str]]:
        """Return `files` without the head for lengths."""
        first: dict[int, str] = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            first.setdefault(id(weight), name)
        buffers = {name for name, _ in self.model.named_buffers()} & set(self.model.state_dict())
        return {WEIGHTS: {name: name for name in [*first.values(), *sorted(buffers)]}}

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write a checkpoint as a Hugging Face folder, or an adapter as PEFT does."""
        for file, names in self.files.items():
            stored = {name: weights[own].contiguous() for name, own in names.items()}
            safetensors.torch.save_file(stored, folder / file, metadata={"format": "pt"})
        self.write_config(folder)
        self.tokenizer.save_pretrained(folder)
        self.metadata.write(folder)
        copy_config_permissions(folder)

    def write_config(self, folder: Path) -> None:
        """Write the config of the network."""
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.save_pretrained(folder)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Read the weights of a checkpoint."""
        weights = {}
        for file, names in self.files.items():
            for name, weight in safetensors.torch.load_file(folder / file).items():
                weights[names.get(name, name)] = weight
        return weights

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint."""
        load(self.model, weights)
        if self.length_head is not None:
            load_head(self.length_head, weights)

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> int:
        """Write the final model without the padding of its vocabulary, and return its number of parameters.

        It is built again on the CPU: the network in training may be sharded over processes.
        """
        model, head = type(self.model)(self.model.config), None
        model.generation_config = self.model.generation_config
        load(model, weights)
        if self.vocabulary is not None:
            model.resize_token_embeddings(self.vocabulary, mean_resizing=False)
        if self.length_head is not None:
            head = LengthHead(self.length_head.weight.shape[1], self.length_head.distance)
            load_head(head, weights)
        lm = LanguageModel(model.to(self.dtype).eval(), self.tokenizer, metadata=self.metadata, length_head=head)
        lm.save_pretrained(folder)
        return sum(parameter.numel() for parameter in model.parameters())


class Adapted(Tuned):
    """A LoRA adapter on a frozen network."""

    folder = "adapter"
    config: Any  # PEFT's config of the adapter; `pretrained` sets it

    def network_file(self) -> dict[str, dict[str, str]]:
        """Return the weights of the adapter."""
        trained = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
        return {ADAPTER_WEIGHTS: {peft.file_name(name): name for name in trained}}

    def write_config(self, folder: Path) -> None:
        """Write the config of the adapter."""
        self.config.target_modules = sorted(self.config.target_modules)  # a set: its order would change from run to run
        self.config.save_pretrained(folder)

    def start_from(self, folder: Path) -> None:
        """Take the weights of another adapter, and of its head for lengths if both have one.

        Raises:
            InputError: There is no adapter in the folder, or it is not of the same kind and size.
        """
        try:
            other = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            network = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
            rank, alpha = other["r"], other["lora_alpha"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InputError(f"lora.start={folder} cannot be read as a LoRA adapter ({reason(error)}).") from error
        names, own = self.files[ADAPTER_WEIGHTS], dict(self.model.named_parameters())
        shapes = {name: own[names[name]].shape for name in names}
        if alpha != self.config.lora_alpha or {name: weight.shape for name, weight in network.items()} != shapes:
            raise InputError(
                f"lora.start={folder} has rank {rank} and alpha {alpha}: it must be an adapter of the same layers of "
                f"this base model, with rank {self.config.r} and alpha {self.config.lora_alpha:g}."
            )
        load(self.model, {names[name]: weight for name, weight in network.items()})
        metadata = Metadata.read(folder)
        if self.length_head is not None and metadata is not None and metadata.lengths is not None:
            width, distance = self.length_head.weight.shape[1], self.length_head.distance
            if metadata.lengths["distance"] == distance:
                head = LengthHead.read(folder / metadata.lengths["file"], width, distance)
                self.length_head.load_state_dict(head.state_dict())

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> int:
        """Write the adapter and return its number of parameters."""
        folder.mkdir(parents=True)
        rounded = {name: weight.to(self.dtype) for name, weight in weights.items() if not name.startswith(HEAD)}
        self.write({**weights, **rounded}, folder)
        return sum(weight.numel() for weight in rounded.values())


def load(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Load the trained weights of a model; those of a head for lengths are left out."""
    model.load_state_dict(weights, strict=False)
    model.tie_weights()


def load_head(head: LengthHead, weights: Mapping[str, Tensor]) -> None:
    """Load the weights of a head for lengths; all others are left out."""
    head.load_state_dict({name: weights[f"{HEAD}{name}"] for name in head.state_dict()})


# ---- making them ----------------------------------------------------------------------------------------------------


def check_method(method: Method, base: str) -> None:
    """Refuse to tune a pretrained model, if one is named, to a method that needs another network."""
    if base and method.abilities.fine_tunes is False:
        able = ", ".join(name for name, each in METHODS.items() if each.abilities.fine_tunes is not False)
        raise InputError(
            f"method={method.name} is not for pretrained models, whose layers it would use otherwise than they were "
            f"made for: leave out base={base}, or use one of {able}."
        )


def head_dim(base: str) -> int:
    """Return the width of an attention head of a pretrained model."""
    return head_width(from_pretrained(AutoConfig, resolve_base(base, "base=")).get_text_config())


def fresh(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, metadata: Metadata) -> Tuned:
    """Make a network with new weights.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the corpus.
        metadata: Method and conditioning; BOS, MASK and the tokenizer's hash are added.
    """
    method = method_of(metadata.method)
    bos, mask_id, size = choose_bos(None, None, tokenizer), choose_mask(recipe.mask, None, tokenizer), len(tokenizer)
    if mask_id is None and method.needs_mask:  # add a token that no text has, the first after the tokenizer's
        mask_id, size = size, size + 1
    model = new_model(
        recipe.shape, vocabulary=-(-size // VOCABULARY_ALIGN) * VOCABULARY_ALIGN,
        positions=recipe.length + method.overhead, dropout=recipe.dropout, attention_dropout=recipe.attention_dropout,
        seed=recipe.seed, bos=bos, eos=tokenizer.eos_token_id, network=method.network,
        **{key: getattr(recipe, key) for key in method.training_options if key != "loss"},
    )  # fmt: skip
    check_model(model)
    metadata = replace(metadata, bos_token_id=bos, mask_token_id=mask_id, tokenizer_hash=tokenizer_hash(tokenizer))
    return Tuned(model, tokenizer, metadata, torch.float32, vocabulary=size)


def pretrained(recipe: Recipe, corpus_tokenizer: PreTrainedTokenizerBase, metadata: Metadata, plan: Plan) -> Tuned:
    """Load a pretrained network, and add an adapter if one is to be trained.

    Args:
        recipe: The recipe.
        corpus_tokenizer: Tokenizer of the corpus; must be the model's own.
        metadata: Method and conditioning; BOS, MASK and hashes are added.
        plan: What the recipe comes to on this machine.
    """
    method, base, lora, quantize = method_of(metadata.method), recipe.base, recipe.adapter, recipe.quantize
    source = resolve_base(base, "base=")
    model, tokenizer, dtype = load_pretrained(source, plan, frozen=lora is not None, quantize=quantize)
    if tokenizer_hash(tokenizer) != tokenizer_hash(corpus_tokenizer):
        raise InputError(
            f"the corpus was prepared with another tokenizer than that of base={base}: prepare it with acgpt prepare … "
            f"--tokenizer {base}, or name the model that it was prepared for with base=."
        )
    if recipe.length + method.overhead > (positions := positions_of(model.config.get_text_config())):
        most = positions - method.overhead
        raise InputError(f"base={base} has {positions} positions, one of them for BOS: use length={most} or less.")
    if not plan.fsdp and quantize is None:
        model.to(plan.local_device)  # before the check below: many CPUs are very slow in bf16
    check_finite(source, model)
    check_model(model)
    own = read_metadata(source, model.config)
    bos, mask_id = choose_bos(default_bos(base, own), own, tokenizer), choose_mask(recipe.mask, own, tokenizer)
    if mask_id is None and method.needs_mask:
        raise InputError(f"method={method.name} needs a MASK token: name one of the tokenizer's with mask=….")
    metadata = replace(metadata, bos_token_id=bos, mask_token_id=mask_id, tokenizer_hash=tokenizer_hash(tokenizer))
    disable_dropout(model)
    if recipe.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    name = DEFAULT_HUB_ID if base == DEFAULT else base
    if lora is None:
        return Tuned(model, tokenizer, metadata, dtype, name)
    # A hash of quantized weights would match no other copy of the model.
    metadata = replace(metadata, base_hash=None if quantize is not None else weights_hash(model))
    assert lora.alpha is not None  # `Lora` has set it
    adapted, config = add_lora(
        model, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets, seed=recipe.seed
    )
    config.base_model_name_or_path = name
    product = Adapted(adapted, tokenizer, metadata, dtype, name)
    product.config = config
    if lora.start is not None:
        product.start_from(DEFAULT_ADAPTER if lora.start == DEFAULT else Path(lora.start))
    return product


def load_pretrained(
    source: str, plan: Plan, *, frozen: bool, quantize: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype]:
    """Load a model to tune, its tokenizer, and the dtype in which the result is written.

    Trained weights are held in fp32; frozen weights in bf16 where the step runs in bf16, or in 4 bits.
    """
    dtype = torch.bfloat16 if plan.half else torch.float32
    if quantize is not None:
        if source.endswith(".gguf"):
            raise InputError(f"quantize={quantize}: {source} is packed already, in a way that cannot be trained on.")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise InputError(f"quantize={quantize} needs the package bitsandbytes: pip install bitsandbytes")
        from transformers import BitsAndBytesConfig

        packing = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        return *load_base(source, dtype, quantization_config=packing, device_map={"": plan.local_device}), dtype
    if frozen:
        return *load_base(source, dtype), dtype
    own = from_pretrained(AutoConfig, source).dtype
    return *load_base(source, torch.float32), own if isinstance(own, torch.dtype) else torch.float32


def choose_mask(mask: str | None, base: Metadata | None, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token for unknown ones: the one named, else the base model's, else the tokenizer's MASK."""
    if mask is not None:
        return token_id("mask", mask, tokenizer)
    if base is not None and base.mask_token_id is not None:
        return base.mask_token_id
    return None if tokenizer.mask_token_id is None else int(tokenizer.mask_token_id)


@torch.no_grad()
def disable_dropout(model: PreTrainedModel) -> None:
    """Switch off the dropout that a pretrained network may bring from its own training."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)
    ids = torch.arange(4, device=model.device)[None]
    with torch.random.fork_rng(devices=[]):
        training = model.train()
        one, other = (training(input_ids=ids, use_cache=False).logits for _ in range(2))
    model.eval()
    if not torch.equal(one, other):
        raise ModelError(f"{type(model).__name__} drops activations at random in a way that cannot be switched off.")
