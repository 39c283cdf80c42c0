"""A small model and adapter on disk, and functions that damage them."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from pathlib import Path

import torch
from models import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file

from acgpt import LanguageModel, Metadata

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DEEP = "[" * 100_000 + "]" * 100_000


def write_model(folder, tokenizer=None, **more):
    """Write a Llama of two layers, with its tokenizer and acgpt.json."""
    words = tokenizer or tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    model = tiny_model(vocabulary=len(words), scale=0.15, **more)
    LanguageModel(model, words, metadata=Metadata()).save_pretrained(folder)


def write_adapter(folder, base):
    """Write a LoRA adapter for a model of `write_model`."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


# ---- damages: functions of a folder ---------------------------------------------------------------------------------


def keys(file=CONFIG, **changes):
    """Set keys of the object in a JSON file; create the file if it is missing."""

    def damage(folder):
        path = folder / file
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | changes))

    return damage


def text(file, content):
    return lambda folder: (folder / file).write_text(content)


def raw(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def cut(file, size):
    """Cut a file off after `size` bytes."""

    def damage(folder):
        content = (folder / file).read_bytes()
        assert len(content) > size
        (folder / file).write_bytes(content[:size])

    return damage


def without(file):
    return lambda folder: (folder / file).unlink()


def instead(file, make):
    """Replace a file by something else: `make` is called with its path."""
    return lambda folder: ((folder / file).unlink(), make(folder / file))


def both(*damages):
    return lambda folder: [damage(folder) for damage in damages]


def tensors(alter, file=WEIGHTS):
    """Change every tensor of a safetensors file."""

    def damage(folder):
        changed = {name: alter(tensor).contiguous() for name, tensor in load_file(folder / file).items()}
        save_file(changed, folder / file, metadata={"format": "pt"})

    return damage


def last_is_nan(tensor):
    tensor.view(-1)[-1] = float("nan")
    return tensor


def index(content):
    """Replace the weights by an index, and move them to part.safetensors."""
    return both(
        lambda folder: shutil.move(folder / WEIGHTS, folder / "part.safetensors"),
        text("model.safetensors.index.json", content if isinstance(content, str) else json.dumps(content)),
    )


def header(size):
    """Write a safetensors file that claims a header of this length."""
    return raw(WEIGHTS, struct.pack("<Q", size) + b'{"a":{}}')


def tokens(alter):
    """Change the object in tokenizer.json."""

    def damage(folder):
        content = json.loads((folder / TOKENIZER).read_text())
        alter(content)
        (folder / TOKENIZER).write_text(json.dumps(content))

    return damage


class Evil:
    """An object that writes a file when its pickle is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (Path(self.marker), "run")


def evil_pickle(file, old, write):
    """Replace the file `old` by a pickle that runs code, which would write FOLDER/marker."""

    def damage(folder):
        (folder / old).unlink()
        content = {"weight": Evil(folder / "marker")}
        if write == "torch":
            torch.save(content, folder / file)
        else:
            (folder / file).write_bytes(pickle.dumps(content))

    return damage
