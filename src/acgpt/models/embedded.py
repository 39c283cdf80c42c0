"""The converted copy of the embedded model, read without the checks that it has passed before.

    ~/.cache/acgpt/SmolLM2-135M-Instruct.Q4_1-0.1.2-98362432/
        config.json, model.safetensors, tokenizer.json, …    converted from the GGUF file on first use
        checked/98a1…                                        an empty file: a record that the checks passed

`acgpt.load` checks every model: its files fit together, its weights are finite, its answers are exact. For the embedded
model and its adapter the outcome is the same every time, and the checks take longer than the answer. So the first load
runs them and writes a record, and later ones on a CPU rely on it. They also read the folder directly, without what
transformers does for any architecture and any tokenizer (`read`); the result is the same.

A record is valid for one state of the files, of this package and of the libraries.
"""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from acgpt.common.files import read_json_object
from acgpt.errors import reason
from acgpt.models.checkpoint import check_config, check_objects

RECORDS = "checked"
TEMPLATE = "chat_template.jinja"
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "peft", "accelerate", "numpy")
CODE = ("common", "engine", "methods", "models", "query")  # packages of acgpt that the outcome of the checks depends on
KEPT = 8  # number of records: environments that share a cache


def state_of(path: Path) -> list[int]:
    """Return what changes when a file is written or replaced: its size and its times of modification and change."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def states_in(folder: Path) -> dict[str, list[int]]:
    """Return the states of the files in a folder, by name."""
    return {path.name: state_of(path) for path in sorted(folder.iterdir()) if path.is_file()}


# ---- the checks ------------------------------------------------------------------------------------------------------


def record_of(folder: Path, adapter: Path | None, device: torch.device, dtype: torch.dtype | str) -> Path | None:
    """Return the file whose existence records that the embedded model has passed its checks, as all is now.

    Its name is a hash of everything that the outcome depends on.

    Args:
        folder: The converted folder.
        adapter: Folder of the embedded adapter, if it is used.
        device: Device of the model.
        dtype: Data type of the weights.

    Returns:
        The path; `None` if the checks always run: the device is no CPU, or the dtype not float32.
    """
    if device.type != "cpu" or dtype != torch.float32:
        return None
    package = Path(__file__).parent.parent
    content = [
        {name: installed(name) for name in LIBRARIES},
        [platform.python_version(), platform.node(), torch.backends.cpu.get_cpu_capability()],
        [None if files is None else states_in(files) for files in (folder, adapter)],
        [state_of(path) for name in CODE for path in sorted((package / name).rglob("*.py"))],
    ]
    return folder / RECORDS / hashlib.sha256(json.dumps(content).encode()).hexdigest()


def write_record(record: Path) -> None:
    """Record that the checks have passed, and remove old records."""
    with suppress(OSError):  # the folder may not be writable
        record.parent.mkdir(exist_ok=True)
        record.touch()
        for old in sorted(record.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
            old.unlink()


def installed(package: str) -> str | None:
    """Return the version of an installed package; `None` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read the converted model in float32, and its tokenizer. Its weights are mapped from the file, not copied.

    Raises:
        Exception: The folder is damaged; every format has its own classes of errors.
    """
    check_objects(folder)
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    check_config(str(folder), config)
    return read_network(folder, config), read_tokenizer(folder)


def read_network(folder: Path, config: Any) -> PreTrainedModel:
    """Read the network as `AutoModelForCausalLM.from_pretrained` does.

    That also compiles the patterns by which transformers renames the weights of all architectures, which takes most of
    its time.
    """
    from transformers.initialization import no_init_weights  # here: if a version lacks it, the folder is read slowly

    with no_init_weights():
        network: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    weights = load_file(folder / "model.safetensors")
    missing, unexpected = network.load_state_dict(weights, strict=False, assign=True)
    network.tie_weights()
    own = dict(network.named_parameters())  # a tied weight is listed once, under the name that is in the file
    if unexpected or not own.keys() <= weights.keys() or any(weight.dtype != torch.float32 for weight in own.values()):
        raise ValueError(f"model.safetensors does not fit config.json: {', '.join([*missing, *unexpected][:3])}")
    network.generation_config = GenerationConfig.from_pretrained(str(folder), trust_remote_code=False)
    return network.eval()


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer as `AutoTokenizer.from_pretrained` does, which parses its 3.5 MB of JSON twice more."""
    settings = read_json_object(folder / "tokenizer_config.json")
    if (kind := settings.pop("tokenizer_class", None)) != PreTrainedTokenizerFast.__name__:
        raise ValueError(f"tokenizer_config.json names the class {reason(kind)}")
    if (folder / TEMPLATE).is_file():
        settings["chat_template"] = (folder / TEMPLATE).read_text(encoding="utf-8")
    file = str(folder / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, name_or_path=str(folder), **settings)
