"""Synthetic generations of a corpus, in the file format of `acgpt generate`, written without acgpt's own code."""

from __future__ import annotations

import hashlib
import json
import random
from itertools import groupby
from pathlib import Path
from typing import Any

from acgpt.data.corpus import Corpus

LENGTH = 31


def roles_of(item: int, mode: str, length: int = LENGTH) -> str:
    """Return the roles of the tokens of a text in a mode."""
    if mode == "unconditional":
        return "g" * 4 + "a" * (length - 4)
    if mode.startswith("infilling"):
        return "g" * 8 + "a" * (length - 16) + "g" * 8
    rng = random.Random(f"{item} {mode.removesuffix('-no-future')}")
    roles = [rng.choice("ga") for _ in range(length)]
    roles[rng.randrange(length)] = "a"
    return "".join(roles)


def line_of(corpus: Corpus, item: int, sample: int, mode: str, noise: float, split: str, length: int):
    """Return a sample: the text of the corpus, with a share of the asked tokens replaced by random letters."""
    rng = random.Random(f"{item} {sample} {mode} {noise}")
    tokenizer, roles = corpus.tokenizer(), roles_of(item, mode, length)
    tokens = corpus.tokens(split)[item * length : (item + 1) * length].tolist()
    tokens = [
        rng.randrange(262, 324) if role == "a" and rng.random() < noise else token
        for token, role in zip(tokens, roles, strict=True)
    ]
    texts, place = [], 0
    for role, same in groupby(roles):
        end = place + len(list(same))
        texts.append((role, tokenizer.decode(tokens[place:end])))
        place = end
    return {
        "item": item,
        "sample": sample,
        "seed": 0,
        "roles": roles,
        "tokens": tokens,
        "log_probs": [-rng.random() * 5 for _ in range(roles.count("a"))],
        "prompt": "".join(text if role == "g" else "____" for role, text in texts),
        "fills": [text for role, text in texts if role == "a"],
        "text": tokenizer.decode(tokens),
    }


def write_generations(
    folder: Path,
    of: Path,
    mode: str = "training",
    *,
    texts: int = 12,
    samples: int = 1,
    noise: float = 0.2,
    split: str = "validation",
    length: int = LENGTH,
    lines: list[dict[str, Any]] | None = None,
    **record: Any,
) -> Path:
    """Write MODE.jsonl and MODE.json for the texts of a corpus into a folder."""
    opened = Corpus.open(of)
    if lines is None:
        lines = [
            line_of(opened, item, sample, mode, noise, split, length)
            for item in range(texts)
            for sample in range(samples)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{mode}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    about = {"hash": f"{split}{texts}{length}", "texts": texts, "length": length, "r_max": 0.6, "seed": 0}
    about |= {"corpus_hash": opened.hash, "split": split, "tokenizer_hash": opened.manifest["tokenizer_hash"]}
    record_fields = {
        "kind": "generations",
        "method": "ac-gpt",
        "options": {},
        "model": "runs/ac/model",
        "adapter": None,
    }
    record_fields |= {"corpus": str(of), "mode": mode, "r_max": 0.6, "set": about, "samples": samples}
    record_fields |= {"sampling": {"temperature": 0.8, "top_p": 0.95, "seed": 0}}
    record_fields |= {"tokenizer_hash": opened.manifest["tokenizer_hash"]}
    record_fields |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(record_fields | record), encoding="utf-8")
    return path
