"""Metadata of a model: `acgpt.json`, beside its weights or its adapter.

    {"format_version": 1, "method": "ac-gpt", "conditioning": {…}, "bos_token_id": 0, "mask_token_id": 3,
     "base_hash": "…", "tokenizer_hash": "…", "lengths": {"file": "length_head.safetensors", "distance": 16}}

Every model trained with acgpt has this file. A model without it is treated as an ordinary causal model, whose
predictions copies make worse (docs/results.md says by how much). The same object is stored under `acgpt` in the
Hugging Face config of a full model, so that it survives tools that copy only the files they know.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from acgpt.common.files import write_json
from acgpt.engine.length_head import FILE as HEAD_FILE
from acgpt.errors import InputError, ModelError, reason
from acgpt.methods import METHODS, Method, import_networks, method_of

FILE = "acgpt.json"
DEFAULT = "default"  # name of the embedded model
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the original of the embedded model, which is 4-bit quantised
ADAPTER_CONFIG = "adapter_config.json"  # only the folder of a PEFT adapter has it
FORMAT_VERSION = 1

import_networks()  # here: whatever loads or saves a model imports this module


@dataclass(frozen=True)
class Metadata:
    """The contents of `acgpt.json`.

    Args:
        method: Name of the method the model was trained with: "ac-gpt" reads copies of the given tokens, "gpt" is a
            plain causal model; `acgpt methods` lists the others.
        conditioning: The distribution of conditioning sets in training.
        bos_token_id: Id of the BOS token, at position 0.
        mask_token_id: Id of the MASK token, which stands for unknown or masked tokens, if the model was trained with
            one.
        base_hash: For an adapter, `weights_hash` of its base model.
        tokenizer_hash: `tokenizer_hash` of the tokenizer used in training.
        lengths: For a model that predicts lengths of gaps: the file of its head, and the width in positions of a gap
            whose length is asked (see `query.lengths`).
        format_version: Version of the file format.
    """

    method: str = "ac-gpt"
    conditioning: dict[str, Any] | None = None
    bos_token_id: int | None = None
    mask_token_id: int | None = None
    base_hash: str | None = None
    tokenizer_hash: str | None = None
    lengths: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    @property
    def reads_copies(self) -> bool:
        """Whether the model was trained on copies of given tokens, and so reads the future."""
        method = METHODS.get(self.method)
        return method is not None and method.reads_copies

    @classmethod
    def from_dict(cls, content: Any, source: str) -> Metadata:
        """Create metadata from the contents of an `acgpt.json`, after a check; `source` names the file in errors."""
        if not isinstance(content, dict) or not isinstance(version := content.get("format_version"), int):
            raise ModelError(
                f"{source} is not acgpt metadata, an object with an integer format_version. Copy it again, or move it "
                "elsewhere."
            )
        if version > FORMAT_VERSION:
            raise ModelError(
                f"{source} has format version {version}; this acgpt reads up to {FORMAT_VERSION}. Upgrade acgpt."
            )
        kinds = {"conditioning": dict, "bos_token_id": int, "mask_token_id": int, "lengths": dict}
        names = ("method", "base_hash", "tokenizer_hash", *kinds)
        known: dict[str, Any] = {name: content[name] for name in names if name in content}
        for name, value in known.items():
            if not isinstance(value, kinds.get(name, str)) and (value is not None or name == "method"):
                raise ModelError(f"{source}: {name} is {reason(repr(value))}, which is not of the right type.")
        if "method" not in known:
            raise ModelError(f"{source}: no method is named.")
        if (lengths := known.get("lengths")) is not None:
            check_lengths(lengths, source)
        return cls(**known, format_version=version)

    @classmethod
    def read(cls, folder: str | Path) -> Metadata | None:
        """Read the metadata of a model or adapter folder, or beside a GGUF file; `None` if there are none."""
        path = (Path(folder).parent if Path(folder).is_file() else Path(folder)) / FILE
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(
                f"{path} is not valid JSON ({reason(error)}). Copy it again, or move it elsewhere."
            ) from error
        return cls.from_dict(content, str(path))

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Metadata | None:
        """Read the metadata in the config of a model; `None` if it has none."""
        content = config.to_dict().get("acgpt")
        return None if content is None else cls.from_dict(content, f"the config of a {config.model_type} model")

    def over(self, base: Metadata | None) -> Metadata:
        """Return the metadata of an adapter with BOS and MASK of its base model where it has none."""
        if base is None:
            return self
        missing = [name for name in ("bos_token_id", "mask_token_id") if getattr(self, name) is None]
        return replace(self, **{name: getattr(base, name) for name in missing})

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of `acgpt.json`; `lengths` only if the model predicts them."""
        return {name: value for name, value in asdict(self).items() if name != "lengths" or value is not None}

    def write(self, folder: str | Path) -> None:
        """Write `acgpt.json` into a folder, atomically."""
        write_json(Path(folder) / FILE, self.as_dict())


def check_lengths(lengths: dict[str, Any], source: str) -> None:
    """Refuse an entry `lengths` of an `acgpt.json` that names no file of its folder, or no distance."""
    file, distance = lengths.get("file"), lengths.get("distance")
    if file != HEAD_FILE:
        raise ModelError(f"{source}: lengths.file is {reason(repr(file))}, not {HEAD_FILE}.")
    if not isinstance(distance, int) or isinstance(distance, bool) or not 1 <= distance <= 4096:
        raise ModelError(f"{source}: lengths.distance is {reason(repr(distance))}, not a whole number from 1 to 4096.")


def model_method(metadata: Metadata | None) -> Method:
    """Return the method that a model's metadata name; a model without metadata is a plain causal one.

    >>> model_method(None).name
    'gpt'
    """
    return method_of(None if metadata is None else metadata.method)


def token_id(role: str, token: int | str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of a token that the user has named, by id or by text.

    Args:
        role: What the token is for, "bos" or "mask"; used in errors.
        token: Its id or its text.
        tokenizer: The model's tokenizer.
    """
    if isinstance(token, int) and not isinstance(token, bool):
        return token
    if not isinstance(token, str):
        raise InputError(f"{role} must be the id of a token or its text, not {token!r}.")
    if (index := tokenizer.get_vocab().get(token)) is None:
        raise ModelError(f"{role}={token!r} is not a token of this tokenizer: give an id, or the text of one token.")
    return int(index)


def choose_bos(bos: int | str | None, metadata: Metadata | None, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the BOS token's id: the user's choice, else the metadata's, else the tokenizer's BOS, else its EOS."""
    if bos is not None:
        return token_id("bos", bos, tokenizer)
    stored = None if metadata is None else metadata.bos_token_id
    for choice in (stored, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if choice is not None:
            return int(choice)
    raise ModelError(
        "the model's metadata name no BOS token, and its tokenizer has neither BOS nor EOS. Name a token with bos=…, "
        "by id or by text."
    )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's vocabulary and of how it splits a probe text."""
    probe = "The 3 naïve cats’ “café” cost €1,234.50…\n\tdef f(x):\r\n    return x  # 🙂 日本語"
    ids = tokenizer(probe, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    content = json.dumps([sorted(tokenizer.get_vocab().items()), ids])
    return hashlib.sha256(content.encode()).hexdigest()


def weights_hash(model: PreTrainedModel) -> str:
    """Return a fast hash of a model's weights: names, shapes, and 64 values of each tensor rounded to bf16.

    It is the same whether the model was loaded in fp32 or bf16, and differs after another quantisation or training.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        probe = flat[:: max(1, flat.numel() // 64)][:64]
        if probe.is_floating_point():
            probe = probe.to(torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(weight.shape)}".encode() + probe.cpu().numpy().tobytes())
    return digest.hexdigest()


def full_weights_hash(model: PreTrainedModel) -> str:
    """Return a hash of every byte of a model's weights. It is slow, and depends on the dtype."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        content = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + content.numpy().tobytes())
    return digest.hexdigest()
