"""Check a checkpoint before a model is built from it, without running code from it or allocating its weights.

    config.json            a JSON object; a model that can be built, from modules that transformers has
    model.safetensors      at least as many numbers as that model has parameters (also *.bin, shards, GGUF)
    adapter_config.json    a PEFT adapter that loads nothing else; the shapes of its weights are those in its file

Models and adapters are built on torch's meta device first, where tensors have shapes but no storage. Other errors are
left to transformers and PEFT; `loading` shortens their messages to one line.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file, cached_files

from acgpt.common.files import read_json_object
from acgpt.engine import peft
from acgpt.errors import NO_CODE, ModelError, reason
from acgpt.models.metadata import ADAPTER_CONFIG

Shapes = dict[str, tuple[int, ...]]

OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
WEIGHTS = (  # in the order in which transformers looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
CONFIGS = ("config.json", "tokenizer_config.json", "tokenizer.json")  # files of which a model or tokenizer has one
NO_CONNECTION = ("ConnectError", "ConnectTimeout")  # errors of httpx, matched by name: the hub's client may vendor it
AGAIN = "Copy it there again."
LARGEST_JSON = 2**26  # bytes
MOST_LAYERS = 1000  # for GGUF files, whose tensors are not counted
MOST_EXPERTS = 10_000
BUFFERS = 2**28  # numbers in buffers that any model may have (tables of positions, for example), whatever its size
SLACK = 2**20  # a model may have twice as many parameters as its files, plus this many; transformers then names those
COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("n_embd", "n_layer", "n_head", "n_positions"),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


# ---- files -----------------------------------------------------------------------------------------------------------


def json_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a checkpoint."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"it is larger than {LARGEST_JSON:,} bytes")
        return read_json_object(path)
    except OSError as error:
        raise ModelError(f"cannot load {path.parent}: cannot read {path.name} ({error.strerror or error}).") from error
    except ValueError as error:
        why = reason(error)
        raise ModelError(f"cannot load {path.parent}: {path.name} is not a JSON object ({why}). {AGAIN}") from error


def check_objects(folder: Path) -> None:
    """Refuse a folder in which a file that should hold a JSON object does not."""
    for name in OBJECTS:
        if (folder / name).is_file():
            content = json_object(folder / name)
            if name == "config.json":
                check_counts(str(folder), content)


def check_hub(name: str, *files: str) -> None:
    """Check the connection to the hub with one request, unless `name` is a folder or one of the files is cached.

    Without a connection the hub's client retries each request for half a minute, and transformers makes several.

    Args:
        name: A folder or a hub id.
        *files: Files of the repository; the first one is requested.

    Raises:
        ConnectionError: There is no connection. Other errors are ignored here; the next request will raise them.
    """
    if Path(name).exists():
        return
    try:
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            get_hf_file_metadata(hf_hub_url(name, files[0]))
    except Exception as error:
        if type(error).__name__ in NO_CONNECTION:
            remedy = "Use a local folder, or try again with a connection."
            raise ConnectionError(f"there is no connection to {constants.ENDPOINT} ({error}). {remedy}") from error


def fetch(source: str, name: str) -> Path | None:
    """Find a file of a folder, or fetch it from the hub; `None` if there is no such file."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    try:
        check_hub(source, name)
        path = cached_file(source, name, **options)
    except Exception:  # no connection or no such repository: reported by code that needs the file
        return None
    return None if path is None else Path(path)


def weight_files(source: str, config: PreTrainedConfig) -> list[Path]:
    """List the files that transformers would read the weights of a folder or hub id from; empty if it finds none."""
    explicit = getattr(config, "transformers_weights", None)
    for name in WEIGHTS if explicit is None else (inside(source, "config.json", explicit),):
        path = fetch(source, name)
        if path is not None:
            return shards(source, path) if name.endswith(".index.json") else [path]
    return []


def shards(source: str, index: Path) -> list[Path]:
    """List the files that an index names."""
    table = json_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelError(f"cannot load {source}: {index.name} has no weight_map, which names the files. {AGAIN}")
    names = list(dict.fromkeys(inside(source, index.name, name) for name in table.values()))
    if not Path(source).is_dir():
        try:
            return [Path(path) for path in cached_files(source, names) or []]
        except Exception:  # see `fetch`
            return []
    for name in names:
        if not (Path(source) / name).is_file():
            raise ModelError(f"cannot load {source}: {index.name} names {name}, which is missing. Copy it there too.")
    return [Path(source) / name for name in names]


def inside(source: str, file: str, name: object) -> str:
    """Return the name of a file that `file` refers to; refuse a path that leads out of the checkpoint."""
    parts = PurePosixPath(str(name).replace("\\", "/"))
    if not isinstance(name, str) or parts.is_absolute() or ".." in parts.parts or ":" in name:
        raise ModelError(f"cannot load {source}: {file} names {reason(name)}, which is not a file of the checkpoint.")
    return name


def shapes(path: Path) -> Shapes:
    """Read the names and shapes of the tensors in a file, without the tensors. A pickle may hold only tensors.

    Raises:
        ModelError: The file is damaged, cannot be read, or would run code.
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "numpy") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        content = torch.load(path, map_location="meta", weights_only=True)
        if not isinstance(content, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
            raise UnpicklingError("it is not a mapping of tensors")
        return {name: tuple(tensor.shape) for name, tensor in content.items()}
    except UnpicklingError as error:
        raise ModelError(
            f"cannot load {path.parent}: {path.name} is a pickle that holds more than tensors, and {NO_CODE}. "
            "Save the weights as safetensors."
        ) from error
    except OSError as error:
        raise ModelError(f"cannot load {path.parent}: cannot read {path.name} ({error.strerror or error}).") from error
    except Exception as error:  # every format has its own classes of errors
        why = reason(error)
        raise ModelError(f"cannot load {path.parent}: {path.name} is damaged or cut off ({why}). {AGAIN}") from error


# ---- models ----------------------------------------------------------------------------------------------------------


def check_config(source: str, config: PreTrainedConfig) -> None:
    """Refuse a config that asks for code from the hub or has a size of zero; reset its attention implementation.

    Args:
        source: Name of the checkpoint, for errors.
        config: A config of transformers. If it names an attention implementation other than eager or sdpa, which may
            need further packages or kernels, that is removed in place: acgpt sets its own.
    """
    for part in parts_of(config):
        if isinstance(attention := part._attn_implementation, str) and "/" in attention:
            kernel = reason(attention)
            raise ModelError(f"cannot load {source}: it asks for the attention kernel {kernel}, and {NO_CODE}.")
    if config._attn_implementation not in ("eager", "sdpa"):
        config._attn_implementation = None
    text = config.get_text_config()
    check_counts(source, {name: getattr(text, name, None) for name in COUNTS + EXPERTS})


def check_counts(source: str, config: Mapping[str, object]) -> None:
    """Refuse a config with no layers, heads or tokens, or with very many experts."""
    for name, value in config.items():
        if name in COUNTS and isinstance(value, int) and value < 1:
            raise ModelError(f"cannot load {source}: its config has {name}={reason(value)}, which must be 1 or more.")
        if name in EXPERTS and isinstance(value, int) and value > MOST_EXPERTS:
            raise ModelError(f"cannot load {source}: its config has {name}={reason(value)}; at most {MOST_EXPERTS:,}.")


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and all configs nested in it, including those not listed in `sub_configs`."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def check_size(source: str, config: PreTrainedConfig, files: list[Path]) -> None:
    """Refuse a config that describes a larger model than the files have weights for.

    Args:
        source: Name of the checkpoint, for errors.
        config: Config of the model.
        files: Files with its weights: safetensors, pickles of tensors, or one GGUF file.
    """
    packed = [path for path in files if path.suffix == ".gguf"]
    tensors = {name: shape for path in files if path not in packed for name, shape in shapes(path).items()}
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    most = MOST_LAYERS if packed else len(tensors)
    if isinstance(layers, int) and layers > most:
        contents = "" if packed else f", and its files hold {most:,} tensors"
        raise ModelError(f"cannot load {source}: its config has num_hidden_layers={reason(layers)}{contents}. {AGAIN}")
    network = on_meta(source, config)
    expected = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
    parameters, stored = numbers(expected), numbers(tensors)
    most = 2 * stored + SLACK
    if packed or getattr(config, "quantization_config", None) is not None:  # a parameter takes at least a bit
        most = stored = 8 * sum(path.stat().st_size for path in files)
    if parameters > most:
        difference = first_difference(expected, tensors)
        raise ModelError(
            f"cannot load {source}: its config describes {parameters:,} parameters, and its files hold at most "
            f"{stored:,}{difference and f'; {difference}'}. {AGAIN}"
        )
    if (buffers := sum(buffer.numel() for buffer in network.buffers())) > BUFFERS + parameters:
        raise ModelError(f"cannot load {source}: its config describes tables of {buffers:,} numbers.")


def numbers(tensors: Shapes) -> int:
    """Return the total number of elements of some tensors."""
    return sum(map(math.prod, tensors.values()))


def first_difference(expected: Shapes, stored: Shapes) -> str:
    """Describe the first weight that has another shape in the files, else the first that is missing from them."""
    for name in [name for name in expected if stored.get(name, expected[name]) != expected[name]]:
        return f"{name} should have shape {expected[name]}, and has {stored[name]}"
    return next((f"{name} is missing" for name in expected if stored and name not in stored), "")


def on_meta(source: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device: shapes without weights."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # architectures fail in different ways on a wrong config
        raise ModelError(f"cannot load {source}: no model can be built from its config ({reason(error)}).") from error
    return network


def check_finite(source: str, network: PreTrainedModel) -> None:
    """Refuse a model whose weights are not all finite, or whose buffers have NaN or +inf (-inf is normal in masks)."""
    for name, weight in network.named_parameters():
        if not all_finite(weight.detach()):
            raise ModelError(f"cannot use {source}: the weights {name} are not all finite numbers. {AGAIN}")
    for name, buffer in network.named_buffers():
        if buffer.is_floating_point() and (buffer.isnan() | (buffer == math.inf)).any():
            raise ModelError(f"cannot use {source}: by its config, {name} are not all finite numbers. {AGAIN}")


def all_finite(weight: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinities. Checking the sum first takes a tenth of the time."""
    if not weight.is_floating_point() or weight.dtype.itemsize == 1 or weight.is_meta:  # quantised, or not in memory
        return True
    total = weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32))
    return bool(total.isfinite()) or bool(weight.isfinite().all())


# ---- adapters --------------------------------------------------------------------------------------------------------


def check_adapter_config(source: str) -> Path | None:
    """Refuse an adapter that loads code or other adapters.

    Args:
        source: Folder or hub id, which need not have an adapter.

    Returns:
        The path of the adapter's config; `None` if there is no adapter.
    """
    path = fetch(source, ADAPTER_CONFIG)
    if path is None:
        return None
    content = json_object(path)
    if content.get("megatron_config") is not None:
        raise ModelError(f"the adapter {source} names a module to import (megatron_core), and {NO_CODE}.")
    if "peft_type" not in content:
        raise ModelError(f"cannot put the adapter {source} on a model: its config names no peft_type. {AGAIN}")
    if content["peft_type"] == "XLORA":
        raise ModelError(f"the adapter {source} is of type XLORA, which loads other adapters: load these by name.")
    return path


def check_adapter(source: str, network: PreTrainedModel) -> None:
    """Refuse an adapter that loads code or other adapters, or whose weights do not match its config.

    Args:
        source: Folder or hub id of the adapter.
        network: The base model.
    """
    path = check_adapter_config(source)
    if path is None:
        return  # PEFT reports it
    weights = next(filter(None, (fetch(source, name) for name in peft.WEIGHTS)), None)
    if weights is None:
        if Path(source).is_dir():
            raise ModelError(f"the adapter {source} has no {peft.WEIGHTS[0]}. {AGAIN}")
        return
    expected, stored = peft.adapter_shapes(path.parent, network), shapes(weights)
    differ = any(stored.get(name, shape) != shape for name, shape in expected.items())
    if differ or numbers(expected) > 2 * numbers(stored) + SLACK:
        raise ModelError(
            f"cannot put the adapter {source} on {type(network).__name__}: by its config it has {numbers(expected):,} "
            f"parameters, and {weights.name} holds {numbers(stored):,}; {first_difference(expected, stored)}."
        )
