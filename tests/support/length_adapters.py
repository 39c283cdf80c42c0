"""A tiny model and two adapters for it, one of which predicts lengths of gaps: for tests of programs that compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import peft
import torch
from models import tiny_model, toy_tokenizer

from acgpt import LanguageModel, Metadata
from acgpt.engine.length_head import FILE, LengthHead

WIDTH, MASK = 16, 2


@dataclass(frozen=True)
class Folders:
    """Folders of a model, of an adapter that predicts no lengths, and of one that does."""

    base: Path
    plain: Path
    lengths: Path


def write_adapters(folder: Path) -> Folders:
    """Write a tiny model and two adapters with random weights, which read copies and MASK."""
    found = Folders(folder / "base", folder / "plain", folder / "lengths")
    network = tiny_model(vocabulary=len(toy_tokenizer()), width=WIDTH, layers=1, positions=512, scale=0.25)
    LanguageModel(network, toy_tokenizer()).save_pretrained(found.base)
    for seed, adapter in enumerate((found.plain, found.lengths)):
        torch.manual_seed(seed)
        network = tiny_model(vocabulary=len(toy_tokenizer()), width=WIDTH, layers=1, positions=512, scale=0.25)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        peft.get_peft_model(network, config).save_pretrained(adapter)
    head, generator = LengthHead(WIDTH, 5), torch.Generator().manual_seed(0)
    for weight in head.parameters():
        weight.data.normal_(0, 0.3, generator=generator)
    head.write(found.lengths)
    Metadata(mask_token_id=MASK).write(found.plain)
    Metadata(mask_token_id=MASK, lengths={"file": FILE, "distance": 5}).write(found.lengths)
    return found
