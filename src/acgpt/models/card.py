"""Model cards: the README.md of a model or adapter folder, written from its `acgpt.json` and its evaluation.

    ---
    library_name: peft              ← shown by the hub and used in its search
    base_model: someone/some-model  ← only if it is a hub id: paths on this machine stay private
    tags: [acgpt, …]
    ---
    # name
    Base model and training data, perplexities, and five lines of Python that load it; for an adapter, those of PEFT.

An existing README.md is never overwritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from acgpt.common.files import read_json_object
from acgpt.errors import InputError
from acgpt.methods import method_of
from acgpt.models.metadata import ADAPTER_CONFIG, DEFAULT, DEFAULT_HUB_ID, FILE, Metadata

CARD = "README.md"
TAGS = ["acgpt", "arbitrary-conditionals", "infilling"]
PEFT = """
PEFT loads it without acgpt, to be read from left to right:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {adapter})
```
"""
SET = {"split": "the split", "texts": "texts:", "length": "tokens a text:", "r_max": "r_max", "hash": "set"}


def write_card(folder: str | Path, results: Mapping[str, Any] | None = None, *, name: str | None = None) -> Path | None:
    """Write the README.md of a model or adapter folder, unless it has one.

    Args:
        folder: A model or adapter folder with an `acgpt.json`.
        results: Further facts, all optional: `base_model` (a hub id or a path), `data` (a description), `merged` (the
            adapter that was merged into the base: a hub id or a path), and `modes`, the perplexities as in
            `acgpt evaluate --json`, with its `set`. The contents of a training run's `results.json` work too.
        name: The title. Default: the name of the folder.

    Returns:
        The path of the README.md; `None` if there was one already, which is left unchanged.
    """
    path = Path(folder) / CARD
    metadata = Metadata.read(folder)
    if metadata is None:
        raise InputError(f"{folder} has no {FILE}, from which the card is written.")
    text = card(name or Path(folder).resolve().name, metadata, results or {}, adapter_base(folder))
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    except FileExistsError:
        return None
    return path


def adapter_base(folder: str | Path) -> str | None:
    """Return the base model that an adapter folder names, "" if it names none; `None` for a full model."""
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        return str(read_json_object(path).get("base_model_name_or_path") or "")
    except (OSError, ValueError):
        return ""


def is_hub_id(name: str) -> bool:
    """Return whether a name is the id of a repository, owner/name, and not a local path."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).exists()


def public(name: str) -> str:
    """Return a hub id unchanged, and only the last part of a path."""
    return name if is_hub_id(name) else Path(name).name


def card(name: str, metadata: Metadata, results: Mapping[str, Any], adapts: str | None) -> str:
    """Return the text of a card.

    Args:
        name: The title.
        metadata: Contents of the folder's `acgpt.json`.
        results: Further facts, see `write_card`.
        adapts: For an adapter, the base model it names ("" if none); `None` for a full model.
    """
    base, recipe = str(results.get("base_model") or adapts or ""), results.get("recipe") or {}
    kind, library = ("a full model", "transformers") if adapts is None else ("a PEFT adapter", "peft")
    known = base if is_hub_id(base) else None
    front = ModelCardData(library_name=library, base_model=known, pipeline_tag="text-generation", tags=TAGS)
    facts = {
        "kind": kind,
        "method": metadata.method,
        "base model": public(base),
        "merged adapter": public(str(results.get("merged") or "")),
        "data": results.get("data") or public(str(recipe.get("corpus") or "")),
        "conditioning": metadata.conditioning and f"`{json.dumps(metadata.conditioning)}`",
        "BOS, MASK": f"{metadata.bos_token_id}, {metadata.mask_token_id}",
    }
    lines = [f"| {fact} | {cell(value)} |" for fact, value in facts.items() if value]
    tables = "\n".join(["| | |", "|---|---|", *lines, *perplexities(results.get("evaluation") or results)])
    arguments, without = repr("FOLDER OR HUB ID"), ""
    if adapts is not None:
        name_of_base = known or public(base) or "BASE MODEL"
        without = "" if name_of_base.endswith(".gguf") else PEFT.format(base=name_of_base, adapter=arguments)
        arguments = f"{DEFAULT if base == DEFAULT_HUB_ID else name_of_base!r}, adapter={arguments}"
    method = method_of(metadata.method)
    question, blank = method.examples
    return f"""\
---
{front.to_yaml()}
---

# {cell(name)}

{method.description[0].upper()}{method.description[1:]}, made with acgpt.

{tables}

## Loading it

```python
import acgpt
lm = acgpt.load({arguments})
print(lm.log_prob({question!r}).log_prob)
for sample in lm.sample({blank!r}, n=3):
    print(sample.text)
```
{without}"""


def perplexities(evaluation: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table of perplexities; none without results. A mode without an answer is shown as --."""
    modes = evaluation.get("modes") or {}
    if not modes:
        return []
    lines = ["", "## Perplexity", "", "| mode | perplexity | 95 % interval | asked tokens |", "|---|---|---|---|"]
    for mode, answer in modes.items():
        row = ["--"] * 3
        if answer is not None:
            interval = answer.get("interval")
            row = [
                ("≤ " if evaluation.get("bound") else "")
                + ("∞" if answer["perplexity"] is None else f"{answer['perplexity']:,.2f}"),
                "--" if interval is None else f"{interval[0]:,.2f} to {interval[1]:,.2f}",
                f"{answer['tokens']:,}" if "tokens" in answer else "--",
            ]
        lines.append(f"| {' | '.join(map(cell, (mode, *row)))} |")
    dataset = evaluation.get("set") or {}
    facts = [f"{label} {dataset[key]}" for key, label in SET.items() if dataset.get(key) is not None]
    return [*lines, *(["", f"Measured on {', '.join(map(cell, facts))}."] if facts else [])]


def cell(value: object) -> str:
    """Return a value as the text of a cell of a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")
