"""Merge an adapter into its base model: `acgpt.merge` and the command `acgpt merge`."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.common.files import disk_remedy
from acgpt.common.options import keywords
from acgpt.engine.device import choose_dtype
from acgpt.engine.peft import DEFAULT, merge_adapter, unwrap
from acgpt.errors import InputError, ModelError, OutputError
from acgpt.models.card import adapter_base, is_hub_id, write_card
from acgpt.models.checkpoint import check_finite
from acgpt.models.language_model import LanguageModel
from acgpt.models.loading import (
    adapter_source,
    add_adapters,
    base_of_adapter,
    default_bos,
    is_default,
    load_base,
    read_length_head,
    read_metadata,
    resolve,
)
from acgpt.models.options import MergeOptions


@keywords(MergeOptions)
def merge(base: str | Path | None, adapter: str | Path, output: str | Path, **keywords: Any) -> dict[str, Any]:
    """Merge an adapter into its base model and write the result as a plain Hugging Face model.

        acgpt.merge("runs/base/model", "runs/infill/adapter", "merged", dtype="bfloat16")
        lm = acgpt.load("merged")

    Weights are merged in at least float32 and rounded once. The result is loaded again, and its predictions must agree
    with those of the model with its adapter. The output folder appears only after this check.

    Args:
        base: The base model: a folder, a hub id or a .gguf file. "default" is the embedded model. `None` is the model
            that the adapter's own config names.
        adapter: A PEFT adapter of it: a folder or a hub id. "default" is the embedded model's adapter.
        output: The folder to write; it must not exist.
        **keywords: See `MergeOptions`.

    Returns:
        A summary of the merged model, with the keys that `acgpt merge --help` lists under --json.

    Raises:
        InputError: The output folder exists.
        ModelError: The model or the adapter cannot be loaded, or the two cannot be merged.
        OutputError: The folder cannot be written.
    """
    folder, adapter, dtype = Path(output), str(adapter), MergeOptions.of(merge, keywords).dtype
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder} is there already, and nothing is overwritten: name another folder with `output`.")
    named = base is None
    if base is None:
        base = base_of_adapter(adapter_source(adapter))
    elif is_default(base):
        base = None
    else:
        base = str(base)
    source, adapters = resolve(base, adapter)
    (adapter_folder,) = adapters.values()
    quantised = source.endswith(".gguf")
    output_dtype = torch.float32 if quantised else "auto"
    output_dtype = output_dtype if dtype == "auto" else choose_dtype(dtype, torch.device("cpu"), quantised)
    try:
        network, tokenizer = load_base(source, output_dtype)
    except ModelError as error:
        if named and base is not None:  # perhaps by a path from another folder
            raise ModelError(
                f"{adapter} names {base} as its base model. {error} Or: acgpt merge BASE ADAPTER."
            ) from error
        raise
    output_dtype = network.dtype
    network = network.to(torch.promote_types(output_dtype, torch.float32))
    own, metadata = read_metadata(adapter_folder), read_metadata(source, network.config)
    metadata = metadata if own is None else own.over(metadata)
    adapted = add_adapters(network, adapters, {DEFAULT: own})
    check_finite(f"{source} + {adapter_folder}", adapted)
    expected = probe(unwrap(adapted)[0])
    try:
        network = merge_adapter(adapted)
    except ModelError as error:
        raise ModelError(f"the adapter {adapter_folder} cannot be merged: {error}") from error
    head = read_length_head(adapter_folder, own, network)
    metadata = None if metadata is None else replace(metadata, base_hash=None)
    lm = LanguageModel(
        network.to(output_dtype), tokenizer, metadata=metadata, bos=default_bos(base, metadata), length_head=head
    )
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        lm.save_pretrained(partial)
        written = lm.metadata
        del lm, network, adapted
        write_card(partial, {"base_model": public_base(base, adapter_folder), "merged": adapter}, name=folder.name)
        reloaded, _ = load_base(partial, expected.dtype)
        check_same(probe(reloaded), expected, output_dtype)
        partial.rename(folder)  # fails if the folder exists by now
    except (OSError, SafetensorError) as error:  # on a full disk safetensors does not raise OSError
        problem = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write {folder}: {problem}. {disk_remedy(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {
        "folder": str(folder),
        "dtype": str(output_dtype).removeprefix("torch."),
        "parameters": sum(weight.numel() for weight in reloaded.parameters()),
        "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        **{name: getattr(written, name) for name in ("method", "conditioning", "bos_token_id", "mask_token_id")},
        "base": "default" if base is None else str(base),
        "adapter": adapter,
    }


def public_base(base: str | None, adapter: str) -> str:
    """Return the name of the base model for the model card: a hub id if the user or the adapter names one."""
    own = adapter_base(adapter) or ""
    return own if is_hub_id(own) and not (base and is_hub_id(base)) else base or "SmolLM2-135M-Instruct"


def probe(network: PreTrainedModel) -> Tensor:
    """Return next-token log-probabilities for a short text with tokens from all over the vocabulary: (slots, V)."""
    config = network.config.get_text_config()
    length = min(64, config.max_position_embeddings)
    ids = torch.arange(length) * 7919 % config.vocab_size
    with torch.no_grad():
        logits: Tensor = network.eval()(input_ids=ids[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)


def check_same(got: Tensor, expected: Tensor, dtype: Any) -> None:
    """Check that the merged model predicts what the model with its adapter does, up to rounding."""
    tolerance = 1e-2 if dtype in (torch.float32, torch.float64) else 0.5  # nats
    error = (got - expected).abs().max().item()
    if not error <= tolerance:
        raise ModelError(
            f"the merged model's log-probabilities differ from the original's by up to {error:.3g} nats, so nothing is "
            "written. The adapter cannot be merged into this architecture (tied embeddings, perhaps): use it unmerged."
        )
