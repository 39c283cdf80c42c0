"""The network of a run: made anew, or a pretrained one that is tuned, whole or through an adapter.

    Fresh      new weights; written with the vocabulary that its tokenizer has (in training it is padded)
    Tuned      all weights of a pretrained model
    Adapted    a LoRA adapter on a frozen one; the adapter alone is trained, kept and written

What is trained, what a checkpoint keeps of it and what is written in the end is all that they differ in.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from acgpt.common.files import open_weights
from acgpt.engine.attention import check_model, head_width
from acgpt.errors import InputError, ModelError
from acgpt.methods import METHODS, method_of
from acgpt.models.adapters import without_peft
from acgpt.models.checkpoint import check_finite, finite_answers
from acgpt.models.language_model import LanguageModel, positions_of
from acgpt.models.loading import default_bos, from_pretrained, is_default, load_base, metadata_of, resolve
from acgpt.models.metadata import DEFAULT, DEFAULT_HUB_ID, Metadata, choose_bos, token_id, tokenizer_hash, weights_hash
from acgpt.training.learner import VOCABULARY_ALIGN, new_model
from acgpt.training.plan import Plan
from acgpt.training.recipe import Lora, Recipe

WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"
OUTER, SLOT = "base_model.model.", ".default"  # what PEFT adds to the name of a weight, and leaves out in files


class Tuned:
    """A network all of whose weights are trained.

    Args:
        model: What is trained and asked.
        tokenizer: Goes with it wherever it is written.
        metadata: So does its acgpt.json.
        dtype: Of the weights that are written in the end; in a checkpoint they are as they are trained.
    """

    place = "model"  # the folder of the run that gets what was trained

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, metadata: Metadata, dtype: torch.dtype
    ) -> None:
        self.model, self.tokenizer, self.metadata, self.dtype = model, tokenizer, metadata, dtype
        self.kept = self.trained()

    @property
    def vocabulary(self) -> int | None:
        """How many tokens it predicts, if that is fewer than it has logits for."""
        return None

    def trained(self) -> set[str]:
        """The names of the weights that a checkpoint keeps: of those that are tied, one."""
        first: dict[int, str] = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            first.setdefault(id(weight), name)
        return set(first.values()) | {name for name, _ in self.model.named_buffers()} & set(self.model.state_dict())

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of a checkpoint."""
        load(self.model, weights, self.kept)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write a checkpoint's share: a Hugging Face folder."""
        safetensors.torch.save_file(dict(weights), folder / WEIGHTS, metadata={"format": "pt"})
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.save_pretrained(folder)
        self.accompany(folder)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights of a checkpoint."""
        return safetensors.torch.load_file(folder / WEIGHTS)

    def accompany(self, folder: Path) -> None:
        """Write what goes with the weights."""
        self.tokenizer.save_pretrained(folder)
        self.metadata.write(folder)
        open_weights(folder)

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> int:
        """Write what was trained as a model of its own; returns how many parameters that is.

        It is built once more, on the CPU: that in training may be shared out among processes.
        """
        model = type(self.model)(self.model.config)
        model.generation_config = self.model.generation_config
        load(model, weights, self.kept)
        self.trim(model)
        LanguageModel(model.to(self.dtype).eval(), self.tokenizer, metadata=self.metadata).save_pretrained(folder)
        return sum(parameter.numel() for parameter in model.parameters())

    def trim(self, model: PreTrainedModel) -> None:
        """Take off what only training needed."""


class Fresh(Tuned):
    """A network with new weights."""

    @property
    def vocabulary(self) -> int:
        """Its tokenizer's, and a MASK that its tokenizer has not; the rest is padding."""
        mask = self.metadata.mask_token_id
        return len(self.tokenizer) if mask is None else max(len(self.tokenizer), mask + 1)

    def trim(self, model: PreTrainedModel) -> None:
        """Cut the padding off."""
        model.resize_token_embeddings(self.vocabulary, mean_resizing=False)


class Adapted(Tuned):
    """A LoRA adapter on a frozen network; `config` is PEFT's word for it. The rest is as in `Tuned`."""

    place = "adapter"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        metadata: Metadata,
        dtype: torch.dtype,
        config: Any,
    ) -> None:
        super().__init__(model, tokenizer, metadata, dtype)
        self.config = config

    def trained(self) -> set[str]:
        """The adapter's weights."""
        return {name for name, weight in self.model.named_parameters() if weight.requires_grad}

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapter as PEFT does."""
        named = {OUTER + name.replace(SLOT, ""): weight.contiguous() for name, weight in weights.items()}
        safetensors.torch.save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        self.config.target_modules = sorted(self.config.target_modules)  # a set: its order would change from run to run
        self.config.save_pretrained(folder)
        self.accompany(folder)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights of an adapter that `write` has written."""
        found = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
        names = {OUTER + name.replace(SLOT, ""): name for name in self.kept}
        return {names.get(name, name): weight for name, weight in found.items()}

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> int:
        """Write the adapter; returns how many parameters it has."""
        folder.mkdir(parents=True)
        self.write({name: weight.to(self.dtype) for name, weight in weights.items()}, folder)
        return sum(weight.numel() for weight in weights.values())


def load(model: PreTrainedModel, weights: Mapping[str, Tensor], names: set[str]) -> None:
    """Give a model the weights of these names, no fewer and no others."""
    if set(weights) != names:
        raise SafetensorError("its weights are not those of this network.")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()


# ---- how they come about --------------------------------------------------------------------------------------------


def check_method(recipe: Recipe) -> None:
    """Refuse to tune a pretrained model to a method that would need another network."""
    if recipe.base and method_of(recipe.method).abilities.fine_tunes is False:
        able = ", ".join(name for name, each in METHODS.items() if each.abilities.fine_tunes is not False)
        raise InputError(
            f"method={recipe.method} is not for pretrained models, whose layers it would use otherwise than they were "
            f"made for: leave out base={recipe.base}, or use one of {able}."
        )


def head_dim(recipe: Recipe) -> int:
    """The width of an attention head of the network that a recipe asks for."""
    if not recipe.base:
        return recipe.shape.width // recipe.shape.heads
    return head_width(from_pretrained(AutoConfig, base_of(recipe)).get_text_config())


def base_of(recipe: Recipe) -> str:
    """Where the recipe's pretrained model is."""
    source, adapter = resolve(recipe.base, False if is_default(recipe.base) else None)
    if adapter is not None:
        raise ModelError(f"base={recipe.base} is an adapter: merge it first (acgpt merge), or name its base model.")
    return source


def base_name(recipe: Recipe) -> str:
    """How others will know the recipe's pretrained model."""
    return DEFAULT_HUB_ID if recipe.base == DEFAULT else recipe.base


def make_network(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, metadata: Metadata, plan: Plan) -> Tuned:
    """The network that a recipe asks for.

    Args:
        recipe: The recipe.
        tokenizer: The corpus's.
        metadata: The method and conditioning; BOS, MASK and hashes are added.
        plan: What the recipe comes to on this machine.
    """
    if recipe.base:
        return pretrained(recipe, tokenizer, metadata, plan)
    method = method_of(metadata.method)
    bos, mask, size = choose_bos(None, None, tokenizer), choose_mask(recipe, None, tokenizer), len(tokenizer)
    if mask is None and method.needs_mask:  # one more token, which no text has: the first after the tokenizer's
        mask, size = size, size + 1
    own = {key: getattr(recipe, key) for key in method.training_options if key != "loss"}
    model = new_model(
        recipe.shape, vocabulary=-(-size // VOCABULARY_ALIGN) * VOCABULARY_ALIGN,
        positions=recipe.length + method.overhead, dropout=recipe.dropout, attention_dropout=recipe.attention_dropout,
        seed=recipe.seed, bos=bos, eos=tokenizer.eos_token_id, network=method.network, **own,
    )  # fmt: skip
    check_model(model)
    metadata = replace(metadata, bos_token_id=bos, mask_token_id=mask, tokenizer_hash=tokenizer_hash(tokenizer))
    return Fresh(model, tokenizer, metadata, torch.float32)


def pretrained(recipe: Recipe, corpus_tokenizer: PreTrainedTokenizerBase, metadata: Metadata, plan: Plan) -> Tuned:
    """A pretrained network, with an adapter if the recipe names one."""
    method = method_of(metadata.method)
    source = base_of(recipe)
    model, tokenizer, dtype = load_pretrained(source, recipe, plan)
    if tokenizer_hash(tokenizer) != tokenizer_hash(corpus_tokenizer):
        raise InputError(
            f"the corpus {recipe.corpus} was prepared with another tokenizer than that of base={recipe.base}: prepare "
            f"it with acgpt prepare … --tokenizer {recipe.base}."
        )
    if recipe.length + method.overhead > (positions := positions_of(model.config.get_text_config())):
        most = positions - method.overhead
        raise InputError(
            f"base={recipe.base} has {positions} positions, one of them for BOS: use length={most} or less."
        )
    if not plan.fsdp and recipe.quantize is None:
        model.to(plan.place)  # before it is tried out: many CPUs are very slow in bf16
    check_finite(source, model)
    with finite_answers(model):
        check_model(model)
    said = metadata_of(source, None, model.config)
    bos = choose_bos(default_bos(recipe.base, said), said, tokenizer)
    mask = choose_mask(recipe, said, tokenizer)
    if mask is None and method.needs_mask:
        raise InputError(f"method={method.name} needs a MASK token: name one of the tokenizer's with mask=….")
    metadata = replace(metadata, bos_token_id=bos, mask_token_id=mask, tokenizer_hash=tokenizer_hash(tokenizer))
    drop_nothing(model)
    if recipe.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if recipe.adapter is None:
        return Tuned(model, tokenizer, metadata, dtype)
    packed = recipe.quantize is not None  # nobody else has the weights in this form
    metadata = replace(metadata, base_hash=None if packed else weights_hash(model))
    adapted, config = add_lora(model, recipe.adapter, recipe.seed)
    config.base_model_name_or_path = base_name(recipe)
    return Adapted(adapted, tokenizer, metadata, dtype, config)


def load_pretrained(
    source: str, recipe: Recipe, plan: Plan
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype]:
    """A model to tune, its tokenizer, and the dtype in which what is made of it is written.

    What is trained is held in fp32. What is frozen is held in bf16 where the step runs in it, or packed to 4 bits.
    """
    if recipe.quantize is not None:
        if source.endswith(".gguf"):
            raise InputError(
                f"quantize={recipe.quantize}: {source} is packed already, in a way that cannot be trained on."
            )
        if importlib.util.find_spec("bitsandbytes") is None:
            raise InputError(f"quantize={recipe.quantize} needs the package bitsandbytes: pip install bitsandbytes")
        from transformers import BitsAndBytesConfig

        packing = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if plan.half else torch.float32,
        )  # fmt: skip
        dtype = torch.bfloat16 if plan.half else torch.float32
        return *load_base(source, dtype, quantization_config=packing, device_map={"": plan.place}), dtype
    if recipe.adapter is not None:
        dtype = torch.bfloat16 if plan.half else torch.float32
        return *load_base(source, dtype), dtype
    own = from_pretrained(AutoConfig, source).dtype
    return *load_base(source, torch.float32), own if isinstance(own, torch.dtype) else torch.float32


def choose_mask(recipe: Recipe, said: Metadata | None, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that stands for unknown ones: the recipe's choice, else the base model's, else the tokenizer's MASK."""
    if recipe.mask is not None:
        return token_id("mask", recipe.mask, tokenizer)
    if said is not None and said.mask_token_id is not None:
        return said.mask_token_id
    return None if tokenizer.mask_token_id is None else int(tokenizer.mask_token_id)


def add_lora(model: PreTrainedModel, lora: Lora, seed: int) -> tuple[PreTrainedModel, Any]:
    """Put a fresh LoRA adapter on a model, and freeze the rest; it changes nothing until it is trained.

    Returns:
        The model, with the adapter in its layers; and PEFT's config of it.
    """
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError as error:
        raise ModelError("LoRA needs the package peft: pip install 'acgpt[peft]'") from error
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,
        target_modules="all-linear" if lora.targets is None else list(lora.targets), inference_mode=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")  # GPT-2's layers; peft sets it right itself
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise InputError(f"lora.targets={lora.targets}: {error}") from error
    return without_peft(adapted)[0], adapted.peft_config["default"]


@torch.no_grad()
def drop_nothing(model: PreTrainedModel) -> None:
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
