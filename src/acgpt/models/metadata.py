"""What a model says it can do: `acgpt.json`, beside its weights or its adapter.

    {"format_version": 1, "method": "ac-gpt", "conditioning": {…}, "bos_token_id": 0, "mask_token_id": 3,
     "base_hash": "…", "tokenizer_hash": "…"}

A model that was trained on the layout carries this file; one that does not is an ordinary causal model, which copies
would only confuse (docs/benchmarks.md says by how much). The same object is mirrored under `acgpt` in the Hugging Face
config of a full model, so it survives tools that copy only what they know.
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
from acgpt.errors import InputError, ModelError, reason
from acgpt.methods import METHODS, Method, method_of

FILE = "acgpt.json"
DEFAULT = "default"  # the name of the embedded model
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what it is a copy of, packed to 4 bits
ADAPTER_CONFIG = "adapter_config.json"  # which only the folder of a PEFT adapter has
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Metadata:
    """The contents of `acgpt.json`.

    Args:
        method: How the model was trained; "ac-gpt" reads copies of the given tokens, "gpt" is a plain causal model, and
            `acgpt methods` lists the others.
        conditioning: The distribution of conditioning sets that it was trained on, for people and for reports.
        bos_token_id: The token at position 0.
        mask_token_id: The token that stands for an unknown one, or a masked one, if the model was trained with one.
        base_hash: `weights_hash` of the model that an adapter belongs to.
        tokenizer_hash: `tokenizer_hash` of the tokenizer that it was trained with.
        format_version: Of this file.
    """

    method: str = "ac-gpt"
    conditioning: dict[str, Any] | None = None
    bos_token_id: int | None = None
    mask_token_id: int | None = None
    base_hash: str | None = None
    tokenizer_hash: str | None = None
    format_version: int = FORMAT_VERSION

    @property
    def reads_copies(self) -> bool:
        """May this model be shown copies of given tokens, and so be asked about the past given the future?"""
        method = METHODS.get(self.method)
        return method is not None and method.reads_copies

    @classmethod
    def from_dict(cls, content: Any, source: str) -> Metadata:
        """Check and take the contents of an `acgpt.json`; `source` names it in errors."""
        if not isinstance(content, dict) or not isinstance(version := content.get("format_version"), int):
            raise ModelError(
                f"{source} is not acgpt metadata, an object with an integer format_version: copy it there again, or "
                "move it elsewhere."
            )
        if version > FORMAT_VERSION:
            raise ModelError(
                f"{source} has format version {version}; this acgpt reads up to {FORMAT_VERSION}. Upgrade acgpt."
            )
        fields: dict[str, tuple[type, ...]] = {
            "method": (str,),
            "conditioning": (dict, type(None)),
            "bos_token_id": (int, type(None)),
            "mask_token_id": (int, type(None)),
            "base_hash": (str, type(None)),
            "tokenizer_hash": (str, type(None)),
        }
        known: dict[str, Any] = {name: content[name] for name in fields if name in content}
        for name, value in known.items():
            if not isinstance(value, fields[name]):
                raise ModelError(f"{source}: {name} is {reason(repr(value))}, which is not of the right type.")
        if "method" not in known:
            raise ModelError(f"{source}: no method is named.")
        return cls(**known, format_version=version)

    @classmethod
    def read(cls, folder: str | Path) -> Metadata | None:
        """The metadata of a model or adapter folder, or beside a GGUF file; `None` if there is none."""
        path = (Path(folder).parent if Path(folder).is_file() else Path(folder)) / FILE
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(
                f"{path} is not valid JSON ({reason(error)}): copy it there again, or move it elsewhere."
            ) from error
        return cls.from_dict(content, str(path))

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Metadata | None:
        """The metadata mirrored in a model's config; `None` if it has none."""
        content = config.to_dict().get("acgpt")
        return None if content is None else cls.from_dict(content, f"the config of a {config.model_type} model")

    def over(self, base: Metadata | None) -> Metadata:
        """What an adapter says, and where it says nothing of BOS and MASK, what its base says of them."""
        if base is None:
            return self
        bos = base.bos_token_id if self.bos_token_id is None else self.bos_token_id
        mask = base.mask_token_id if self.mask_token_id is None else self.mask_token_id
        return replace(self, bos_token_id=bos, mask_token_id=mask)

    def write(self, folder: str | Path) -> None:
        """Write `acgpt.json` into a folder, whole or not at all."""
        write_json(Path(folder) / FILE, asdict(self))


def model_method(metadata: Metadata | None) -> Method:
    """The method that a model's metadata names; a model that has none is a plain causal one.

    >>> model_method(None).name
    'gpt'
    """
    return method_of(None if metadata is None else metadata.method)


def token_id(role: str, token: int | str, tokenizer: PreTrainedTokenizerBase) -> int:
    """A token that the user named for a role ("bos", "mask"): an id, or the text of one token."""
    if isinstance(token, int) and not isinstance(token, bool):
        return token
    if not isinstance(token, str):
        raise InputError(f"{role} must be the id of a token or its text, not {token!r}.")
    if (found := tokenizer.get_vocab().get(token)) is None:
        raise ModelError(f"{role}={token!r} is not a token of this tokenizer: give an id, or the text of one token.")
    return int(found)


def choose_bos(bos: int | str | None, metadata: Metadata | None, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token at position 0: the user's choice, else the metadata's, else the tokenizer's BOS, else its EOS."""
    if bos is not None:
        return token_id("bos", bos, tokenizer)
    said = None if metadata is None else metadata.bos_token_id
    for choice in (said, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if choice is not None:
            return int(choice)
    raise ModelError(
        "neither the model's metadata nor its tokenizer names a beginning-of-sequence token, and the tokenizer has no "
        "end-of-sequence one to stand in for it. Name a token with bos=…, by id or by its text."
    )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what a tokenizer does: its vocabulary, and how it splits a probe text."""
    probe = "The 3 naïve cats’ “café” cost €1,234.50…\n\tdef f(x):\r\n    return x  # 🙂 日本語"
    ids = tokenizer(probe, add_special_tokens=False)["input_ids"]
    content = json.dumps([sorted(tokenizer.get_vocab().items()), ids])
    return hashlib.sha256(content.encode()).hexdigest()


def weights_hash(model: PreTrainedModel) -> str:
    """A fingerprint of a model's weights: names, shapes, and 64 values of each tensor rounded to bf16.

    Cheap for a model of any size, the same whether it was loaded in fp32 or bf16, and different for another
    quantisation or another training.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        probe = flat[:: max(1, flat.numel() // 64)][:64]
        if probe.is_floating_point():
            probe = probe.to(torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(weight.shape)}".encode() + probe.cpu().numpy().tobytes())
    return digest.hexdigest()


def every_weight_hash(model: PreTrainedModel) -> str:
    """A hash of every byte of a model's weights: not cheap, and another one in another dtype."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        content = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + content.numpy().tobytes())
    return digest.hexdigest()
