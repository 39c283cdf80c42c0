"""A model and its adapter become one plain Hugging Face model: what `acgpt.merge` and `acgpt merge` do."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.engine.device import choose_dtype
from acgpt.engine.peft import DEFAULT
from acgpt.errors import InputError, ModelError, OutputError
from acgpt.models.card import adapter_base, is_hub_id, write_card
from acgpt.models.checkpoint import check_finite
from acgpt.models.language_model import LanguageModel
from acgpt.models.loading import add_adapters, default_bos, is_default, load_base, metadata_of, read_metadata, resolve
from acgpt.models.metadata import Metadata


def merge(base: str | Path | None, adapter: str | Path, output: str | Path, *, dtype: str = "auto") -> dict[str, Any]:
    """Merge an adapter into its model and write one plain model, whole or not at all.

        acgpt.merge("runs/base/model", "runs/infill/adapter", "merged", dtype="bfloat16")
        lm = acgpt.load("merged")

    Weights are merged in float32 and rounded once. What was written is read again and must answer as the two together
    do; the folder gets its name only then.

    Args:
        base: A folder, a hub id or a .gguf file; "default" or `None` is the embedded model.
        adapter: A PEFT adapter for it: a folder or a hub id; "default" is the embedded model's.
        output: The folder; it must not be there yet.
        dtype: Of the weights that are written. Default: as the base has them (a .gguf file: float32).

    Returns:
        What was written, with the keys that `acgpt merge --help` lists under --json.

    Raises:
        InputError: The folder is there already.
        ModelError: The model or the adapter cannot be loaded, or the two cannot be merged.
        OutputError: The folder cannot be written.
    """
    named, folder, adapter = base, Path(output), str(adapter)
    base = None if base is None or is_default(base) else str(base)
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder} is there already, and nothing is overwritten: name another folder with `output`.")
    source, found = resolve(base, adapter)
    assert found is not None
    quantised = source.endswith(".gguf")
    wanted = torch.float32 if quantised else "auto"
    wanted = wanted if dtype == "auto" else choose_dtype(dtype, torch.device("cpu"), quantised)
    network, tokenizer = load_base(source, wanted)
    wanted = network.dtype
    network = network.to(torch.promote_types(wanted, torch.float32))
    metadata = metadata_of(source, found, network.config)
    adapted = add_adapters(network, {DEFAULT: found}, {DEFAULT: read_metadata(found)})
    check_finite(f"{source} + {found}", adapted)
    expected = probe(adapted.get_base_model())
    try:
        network = adapted.merge_and_unload(safe_merge=True)
    except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
        raise ModelError(f"the adapter {found} is of a kind that cannot be merged: {error}") from error
    metadata = None if metadata is None else replace(metadata, base_hash=None)
    lm = LanguageModel(network.to(wanted), tokenizer, metadata=metadata, bos=default_bos(base, metadata))
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        lm.save_pretrained(partial)
        del lm, network, adapted
        about = {"base_model": named_base(base, found), "merged": adapter}
        write_card(partial, about, name=folder.name)
        again, _ = load_base(partial, expected.dtype)
        check_same(probe(again), expected, wanted)
        partial.rename(folder)  # which fails if there is one by now
    except (OSError, SafetensorError) as error:  # what a full disk gives is no OSError
        raise OutputError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**summary(folder, again), "base": "default" if named is None else str(named), "adapter": adapter}


def named_base(base: str | None, adapter: str) -> str:
    """How the base is called: as the user did, or as its adapter does if that is a hub id and the user's is a path."""
    own = adapter_base(adapter) or ""
    return own if is_hub_id(own) and not (base and is_hub_id(base)) else base or "SmolLM2-135M-Instruct"


def probe(network: PreTrainedModel) -> Tensor:
    """Log-probabilities of the next token in a short text of tokens from all over the vocabulary: (slots, V)."""
    config = network.config.get_text_config()
    length = min(64, config.max_position_embeddings)
    ids = torch.arange(length) * 7919 % config.vocab_size
    with torch.no_grad():
        logits: Tensor = network.eval()(input_ids=ids[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)


def check_same(got: Tensor, expected: Tensor, dtype: Any) -> None:
    """What was written must answer as the model with its adapter does, to rounding."""
    tolerance = 1e-2 if dtype in (torch.float32, torch.float64) else 0.5  # nats
    error = (got - expected).abs().max().item()
    if not error <= tolerance:
        raise ModelError(
            f"what was merged answers otherwise than the model with its adapter, by up to {error:.3g} nats, so nothing "
            "is written: this adapter's weights do not fit into a model of this architecture (tied embeddings, "
            "perhaps). Use the adapter as it is."
        )


def summary(folder: Path, network: PreTrainedModel) -> dict[str, Any]:
    """What there is to know of a folder that was written."""
    metadata = Metadata.read(folder)
    assert metadata is not None
    return {
        "folder": str(folder),
        "dtype": str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")),
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "method": metadata.method,
        "conditioning": metadata.conditioning,
        "bos_token_id": metadata.bos_token_id,
        "mask_token_id": metadata.mask_token_id,
    }
