"""Samples side by side: for a few texts, what each method drew in each mode, as one HTML page that needs nothing else.

Given text is tinted, what was drawn stands in its place, coloured by how likely the model found it; the log-probability
shows under the pointer. That is token by token where the tokenizer is at hand (in the folder of the model or of the
corpus), and else fill by fill. All text is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from acgpt.errors import CONTROLS
from acgpt.evaluation.generations import BLANK, Generation, Generations
from acgpt.methods import METHODS
from acgpt.query.modes import MODES
from acgpt.report.page import template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS = 3  # that are shown
UNKNOWN, END = "▢", "¶\n"
LONG, EDGE = 600, 200  # characters: what is given in a longer run is folded up but for its edges
SURPRISE = (0.5, 0.1, 0.01)  # the probabilities between two colours
WORDS = ("over 50 %", "over 10 %", "over 1 %", "less")
Segment = tuple[str, str, list[float]]  # role, text, log-probabilities


@dataclass(frozen=True, eq=False)
class Shown:
    """A column of the page.

    Args:
        generated: What was drawn.
        method: What it is called.
        about: What else there is to say of the model.
        place: Among the methods.
        seed: Of the training; of several the first is shown.
        same: What has the same differs in the seed only.
    """

    generated: Generations
    method: str
    about: str
    place: int
    seed: int
    same: str

    @property
    def mode(self) -> str:
        """In which it was drawn."""
        return str(self.generated.record["mode"])


def samples_page(columns: Sequence[Shown]) -> str:
    """Render the page of all that was drawn."""
    found = pd.DataFrame(
        {
            "column": pd.Series(columns, dtype=object),
            "texts": [texts_of(each.generated.record["set"]) for each in columns],
            **{key: [getattr(each, key) for each in columns] for key in ("mode", "method", "same", "place", "seed")},
        }
    )
    first = found.sort_values(["place", "seed"], kind="stable").drop_duplicates(["texts", "mode", "method", "same"])
    sets = [list(members) for _, members in first.groupby("texts", sort=False)["column"]]
    tokenizers: dict[str, PreTrainedTokenizerBase | None] = {}
    texts = []
    for number, members in enumerate(sets):
        key = str(members[0].generated.record["set"]["hash"])
        chosen, samples = pick([each.generated for each in members])
        for item in chosen:
            modes = []
            for mode in modes_of(members):
                cards = [
                    card(each, sample, segments(sample, tokenizer_of(each.generated.record, tokenizers)))
                    for each in members
                    if each.mode == mode and (sample := samples[each.generated.path].get(item)) is not None
                ]
                if cards:
                    modes.append((MODES[mode].title if mode in MODES else mode, cards))
            name = f"Text {item}" + (f" of set {key[:8]}" if len(sets) > 1 else "")
            texts.append({"name": name, "anchor": f"text-{number}-{item}", "modes": modes})
    return template("samples.html").render(texts=texts, colours=WORDS)


def texts_of(described: Mapping[str, Any]) -> str:
    """What two evaluation sets have in common that differ in how many texts they have, the first ones of a corpus."""
    if described.get("corpus_hash") is None:
        return str(described["hash"])
    return json.dumps({key: x for key, x in described.items() if key not in ("hash", "texts")}, sort_keys=True)


def modes_of(members: Sequence[Shown]) -> list[str]:
    """The modes that there are: the five in the paper's order, then others."""
    found = dict.fromkeys(each.mode for each in members)
    return [*(mode for mode in MODES if mode in found), *(mode for mode in found if mode not in MODES)]


def pick(generated: Sequence[Generations]) -> tuple[list[int], dict[Path, dict[int, Generation]]]:
    """The first texts of the first file, and of every file the first sample of each; no more is read than that."""
    chosen: list[int] = []
    for sample in generated[0]:
        chosen += [sample.item] if sample.item not in chosen else []
        if len(chosen) == TEXTS:
            break
    found: dict[Path, dict[int, Generation]] = {}
    for each in generated:
        here = found.setdefault(each.path, {})
        for sample in each:
            if sample.item in chosen:
                here.setdefault(sample.item, sample)
            if len(here) == len(chosen):
                break
    return chosen, found


def tokenizer_of(
    record: Mapping[str, Any], known: dict[str, PreTrainedTokenizerBase | None]
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that made the tokens, if it is at hand: in the folder of the model, or of the corpus."""
    key = str(record["tokenizer_hash"])
    if known.get(key) is None:
        from transformers import AutoTokenizer

        from acgpt.models.metadata import tokenizer_hash

        known[key] = None
        corpus = record.get("corpus")
        for place in (Path(str(record["model"])), Path(str(corpus)) / "tokenizer" if corpus else None):
            if place is not None and (place / "tokenizer_config.json").is_file():
                try:
                    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
                except Exception:  # whatever that folder holds: the page shows fills instead of tokens
                    continue
                if tokenizer_hash(tokenizer) == key:
                    known[key] = tokenizer
                    break
    return known[key]


def segments(sample: Generation, tokenizer: PreTrainedTokenizerBase | None) -> list[Segment]:
    """The text in pieces: what is given in runs, what was drawn by token, or without a tokenizer by fill."""
    if tokenizer is not None and None not in sample.tokens:
        from acgpt.query.text import pieces

        ids = [token for token in sample.tokens if token is not None]
        texts = [
            END if i == tokenizer.eos_token_id else text for i, text in zip(ids, pieces(ids, tokenizer), strict=True)
        ]
        scores = iter(sample.log_probs or [math.nan] * sample.roles.count("a"))
        drawn = [
            (role, text, [next(scores)] if role == "a" else []) for role, text in zip(sample.roles, texts, strict=True)
        ]
        return [(role, text, [x for x in score if not math.isnan(x)]) for role, text, score in drawn]
    around = sample.prompt.split(BLANK)
    if len(around) != len(sample.fills) + 1 or "".join(interleaved(around, sample.fills)) != sample.text:
        return [("a", sample.text, list(sample.log_probs or ()))]  # where the fills stand cannot be told
    scores = iter(sample.log_probs or ())
    lengths = [len(run) for run in sample.runs]
    by_fill = [[next(scores) for _ in range(length)] if sample.log_probs else [] for length in lengths]
    found: list[Segment] = []
    for text, fill, own in zip(around, sample.fills, by_fill, strict=False):
        found += [("g", text, []), ("a", fill, own)]
    return [*found, ("g", around[-1], [])]


def interleaved(around: Sequence[str], fills: Sequence[str]) -> list[str]:
    """What stands around the fills, and they, in turn."""
    return [text for pair in zip(around, [*fills, ""], strict=True) for text in pair]


def card(column: Shown, sample: Generation, parts: Sequence[Segment]) -> dict[str, Any]:
    """What one method drew, for `templates/sample.html`."""
    asked = sample.roles.count("a")
    words = f"{asked} tokens drawn, {sample.roles.count('g')} given"
    method = METHODS.get(str(column.generated.record["method"]))
    if sample.log_probs and not (method is not None and method.bound):
        words += f"; perplexity {math.exp(min(-math.fsum(sample.log_probs) / asked, 700)):,.1f}"
    pieces = []
    for role, run in groupby(parts, key=lambda part: part[0]):
        if role == "a":
            before: list[float] = []  # of tokens that are but a part of a character: it comes with the last of them
            for _, text, log_probs in run:
                before += log_probs
                if text:
                    pieces.append(drawn(text, before))
                    before = []
            pieces += [drawn("\ufffd", before)] if before else []
        else:
            text = "".join(UNKNOWN if role == "u" else text for _, text, _ in run)
            pieces.append({"given": True, "text": printable(text)})
    about = {"method": column.method, "mode": column.mode, "about": column.about, "words": words}
    return {**about, "pieces": pieces, "long": LONG, "edge": EDGE}


def drawn(text: str, log_probs: Sequence[float]) -> dict[str, Any]:
    """A token, or a fill, with its log-probability."""
    piece = {"given": False, "text": printable(text)}
    if not log_probs:
        return {**piece, "colour": 9, "title": ""}
    total = math.fsum(log_probs)
    words = f"log p {total:.2f}"
    if len(log_probs) > 1:
        words += f", {len(log_probs)} tokens: " + " ".join(f"{each:.2f}" for each in log_probs)
    likely = math.exp(total / len(log_probs))
    colour = next((n for n, least in enumerate(SURPRISE) if likely > least), len(SURPRISE))
    return {**piece, "colour": colour, "title": words}


def printable(text: str) -> str:
    """A text with symbols for control characters; line ends stay."""
    return text.translate(CONTROLS | {9: "\t", 10: "\n", 13: "\n"})
