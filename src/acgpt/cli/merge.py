"""`acgpt merge`: a model and its adapter become one plain Hugging Face model."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acgpt.cli.ui import Dtype, emit, hush, option
from acgpt.errors import InputError, ModelError, OutputError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

HELP = {
    "base": "A folder, a Hugging Face hub id or a .gguf file; 'default' is the embedded SmolLM2-135M-Instruct.",
    "adapter": "A PEFT adapter for it: a folder or a hub id; default: the embedded model's.",
    "folder": "Where the model goes: a folder that is not there yet.",
    "dtype": "Of the weights that are written: float32, bfloat16, float16, float64. "
    "Default: auto, as the base has them (a .gguf file: float32).",
    "json": "For programs: one JSON object in a line, with the keys named above.",
}


def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help=HELP["base"])],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help=HELP["adapter"])],
    folder: Annotated[Path, option("--output", "-o", metavar="FOLDER", help=HELP["folder"])],
    dtype: Annotated[Dtype, option("--dtype", metavar="NAME", help=HELP["dtype"])] = Dtype.auto,
    as_json: Annotated[bool, option("--json", help=HELP["json"])] = False,
) -> None:
    r"""Merge an adapter into its model: one plain model, for any program.

    acgpt merge runs/base/model runs/infill/adapter -o merged
    acgpt merge model.Q4_1.gguf someone/adapter -o merged --dtype bfloat16

    The folder opens in transformers and in acgpt, and says in its acgpt.json what
    the adapter said. Weights are merged in float32 (4 bytes a parameter; a .gguf
    file is unpacked) and rounded once. What was written is read again and must
    answer as the two together do; it gets its name only then.

    Keys of --json:
      folder, base, adapter, dtype, parameters, bytes (of weights),
      method, conditioning, bos_token_id, mask_token_id
    """
    hush()
    written = write_merged(None if base == "default" and not Path(base).exists() else base, adapter, folder, dtype)
    if as_json:
        emit({**written, "base": base, "adapter": adapter})
        return
    print(
        f"{folder}: {written['parameters']:,} parameters in {written['dtype']}, {written['bytes'] / 2**20:,.0f} MB, "
        f"method {written['method']}"
    )


def write_merged(base: str | None, adapter: str, folder: Path, dtype: str) -> dict[str, Any]:
    """Merge and write, whole or not at all.

    Args:
        base: As `model` in `acgpt.load`.
        adapter: As in `acgpt.load`.
        folder: It must not be there yet.
        dtype: Of what is written: as in `acgpt.load`, but "auto" is the base's own.

    Returns:
        What was written, with the keys of `acgpt merge --json`.
    """
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder} is there already, and nothing is overwritten: name another folder with -o.")
    import torch
    from safetensors import SafetensorError

    from acgpt.engine.device import choose_dtype
    from acgpt.models.adapters import DEFAULT
    from acgpt.models.card import write_card
    from acgpt.models.checkpoint import check_finite
    from acgpt.models.language_model import LanguageModel
    from acgpt.models.loading import (
        add_adapters,
        default_bos,
        load_base,
        metadata_of,
        read_metadata,
        resolve,
    )

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
    return summary(folder, again)


def named_base(base: str | None, adapter: str) -> str:
    """How the base is called: as the user did, or as its adapter does if that is a hub id and the user's is a path."""
    from acgpt.models.card import adapter_base, is_hub_id

    own = adapter_base(adapter) or ""
    return own if is_hub_id(own) and not (base and is_hub_id(base)) else base or "SmolLM2-135M-Instruct"


def probe(network: PreTrainedModel) -> Tensor:
    """Log-probabilities of the next token in a short text of tokens from all over the vocabulary: (slots, V)."""
    import torch

    config = network.config.get_text_config()
    length = min(64, config.max_position_embeddings)
    ids = torch.arange(length) * 7919 % config.vocab_size
    with torch.no_grad():
        logits: Tensor = network.eval()(input_ids=ids[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)


def check_same(got: Tensor, expected: Tensor, dtype: Any) -> None:
    """What was written must answer as the model with its adapter does, to rounding."""
    import torch

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
    import json

    from acgpt.models.metadata import Metadata

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
