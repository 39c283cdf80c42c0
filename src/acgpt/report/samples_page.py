"""Samples side by side: for a few texts, the samples of each method in each mode, as one self-contained HTML page.

Given text is tinted. Sampled text is in its place, coloured by its probability under the model; its log-probability is
shown on hover. This is per token if the tokenizer is available in the folder of the model or of the corpus, else per
fill. All text is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acgpt.errors import CONTROLS
from acgpt.evaluation.generations import BLANK, Generation, Generations
from acgpt.methods import METHODS
from acgpt.query.modes import MODES
from acgpt.report.page import template
from acgpt.report.paper import method_order, size_title
from acgpt.report.runs import Run
from acgpt.report.scores import method_name, sampling_settings
from acgpt.report.tables import grouped, known_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS = 3  # number of texts on the page
UNKNOWN, END = "▢", "¶\n"
LONG, EDGE = 600, 200  # characters: a longer run of given text is folded except for its edges
PROBABILITY_STEPS = (0.5, 0.1, 0.01)  # bounds between two colours
PROBABILITY_LABELS = ("over 50 %", "over 10 %", "over 1 %", "less")
Segment = tuple[str, str, list[float]]  # role, text, log-probabilities


class SampleColumn:
    """A column of the page: generations of one model in one mode.

    Attributes:
        generated: The generations.
        mode: Their mode.
        method: Name of the method.
        description: Further description of the model.
        texts: Key that is the same for evaluation datasets that differ only in how many texts of a corpus they use.
        identity: Key of columns that differ only in the seed of training; the first of several seeds is shown.
        order: Index of the method, and the seed.
    """

    def __init__(self, generated: Generations, run: Run | None) -> None:
        self.generated, record = generated, generated.record
        dataset, model = record["set"], str(record["model"])
        self.mode, self.method = str(record["mode"]), method_name(record)
        size = "" if run is None else size_title(run.size or Path(run.base).name)
        self.description = ", ".join(filter(None, [size, f"r_max {record.get('r_max')}", run.name if run else model]))
        corpus = {**dataset, "hash": None, "texts": None}
        self.texts = json.dumps(dataset["hash"] if dataset.get("corpus_hash") is None else corpus, sort_keys=True)
        key = [self.texts, self.mode, self.method, sampling_settings(record), run.identity if run else model]
        self.identity = json.dumps(key, sort_keys=True)
        self.order = method_order(str(record["method"])), run.seed if run else 0


def samples_page(columns: Sequence[SampleColumn]) -> str:
    """Render the page of all generations."""
    same = grouped(sorted(columns, key=lambda column: column.order), lambda column: column.identity)
    sets = grouped([first for first, *_ in same], lambda column: column.texts)
    tokenizers: dict[str, PreTrainedTokenizerBase | None] = {}
    texts = []
    for number, columns_of_set in enumerate(sets):
        key = str(columns_of_set[0].generated.record["set"]["hash"])
        samples = pick([column.generated for column in columns_of_set])
        for item in samples[columns_of_set[0].generated.path]:
            modes = []
            for mode in known_first((column.mode for column in columns_of_set), MODES):
                cards = [
                    card(column, sample, segments(sample, tokenizer_of(column.generated.record, tokenizers)))
                    for column in columns_of_set
                    if column.mode == mode and (sample := samples[column.generated.path].get(item)) is not None
                ]
                if cards:
                    modes.append((MODES[mode].title if mode in MODES else mode, cards))
            name = f"Text {item}" + (f" of set {key[:8]}" if len(sets) > 1 else "")
            texts.append({"name": name, "anchor": f"text-{number}-{item}", "modes": modes})
    return template("samples.html").render(texts=texts, colours=PROBABILITY_LABELS)


def pick(generated: Sequence[Generations]) -> dict[Path, dict[int, Generation]]:
    """Return from each file its first samples of the first texts of the first file; read no further."""
    samples: dict[Path, dict[int, Generation]] = {}
    for generations in generated:
        chosen, by_item = next(iter(samples.values()), None), dict[int, Generation]()
        samples[generations.path] = by_item
        for sample in generations:
            if chosen is None or sample.item in chosen:
                by_item.setdefault(sample.item, sample)
            if len(by_item) == (TEXTS if chosen is None else len(chosen)):
                break
    return samples


def tokenizer_of(
    record: Mapping[str, Any], known: dict[str, PreTrainedTokenizerBase | None]
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the tokens, if it is in the folder of the model or of the corpus."""
    key = str(record["tokenizer_hash"])
    if known.get(key) is None:
        from transformers import AutoTokenizer

        from acgpt.models.metadata import tokenizer_hash

        known[key] = None
        corpus = record.get("corpus")
        for folder in (Path(str(record["model"])), Path(str(corpus)) / "tokenizer" if corpus else None):
            if folder is not None and (folder / "tokenizer_config.json").is_file():
                try:
                    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
                except Exception:  # any damaged tokenizer: the page then shows fills instead of tokens
                    continue
                if tokenizer_hash(tokenizer) == key:
                    known[key] = tokenizer
                    break
    return known[key]


def segments(sample: Generation, tokenizer: PreTrainedTokenizerBase | None) -> list[Segment]:
    """Split a text into pieces: given text in runs, sampled text by token, or by fill without a tokenizer."""
    scores = iter(sample.log_probs or ())
    if tokenizer is not None and None not in sample.tokens:
        from acgpt.query.text import pieces

        ids = [token for token in sample.tokens if token is not None]
        texts = [
            END if i == tokenizer.eos_token_id else text for i, text in zip(ids, pieces(ids, tokenizer), strict=True)
        ]
        return [
            (role, text, list(islice(scores, 1)) if role == "a" else [])
            for role, text in zip(sample.roles, texts, strict=True)
        ]
    given = sample.prompt.split(BLANK)
    parts: list[Segment] = []
    for text, fill, run in zip(given, sample.fills, sample.runs, strict=False):
        parts += [("g", text, []), ("a", fill, list(islice(scores, len(run))))]
    parts.append(("g", given[-1], []))
    if len(given) != len(sample.fills) + 1 or "".join(text for _, text, _ in parts) != sample.text:
        return [("a", sample.text, list(sample.log_probs or ()))]  # the positions of the fills are ambiguous
    return parts


def card(column: SampleColumn, sample: Generation, parts: Sequence[Segment]) -> dict[str, Any]:
    """Return the data of one sample for `templates/sample.html`."""
    asked = sample.roles.count("a")
    summary = f"{asked} tokens sampled, {sample.roles.count('g')} given"
    method = METHODS.get(str(column.generated.record["method"]))
    if sample.log_probs and not (method is not None and method.bound):
        summary += f"; perplexity {math.exp(min(-math.fsum(sample.log_probs) / asked, 700)):,.1f}"
    pieces = []
    for role, run in groupby(parts, key=lambda part: part[0]):
        if role == "a":
            pending: list[float] = []  # of tokens that are parts of a character, which appears with the last one
            for _, text, log_probs in run:
                pending += log_probs
                if text:
                    pieces.append(sampled_piece(text, pending))
                    pending = []
            pieces += [sampled_piece("\ufffd", pending)] if pending else []
        else:
            text = "".join(UNKNOWN if role == "u" else text for _, text, _ in run)
            pieces.append({"given": True, "text": printable(text)})
    header = {"method": column.method, "mode": column.mode, "description": column.description, "summary": summary}
    return {**header, "pieces": pieces, "long": LONG, "edge": EDGE}


def sampled_piece(text: str, log_probs: Sequence[float]) -> dict[str, Any]:
    """Return the data of a sampled token or fill with its log-probability."""
    piece = {"given": False, "text": printable(text)}
    if not log_probs:
        return {**piece, "colour": 9, "title": ""}
    total = math.fsum(log_probs)
    title = f"log p {total:.2f}"
    if len(log_probs) > 1:
        title += f", {len(log_probs)} tokens: " + " ".join(f"{log_prob:.2f}" for log_prob in log_probs)
    probability = math.exp(total / len(log_probs))
    colour = next((n for n, bound in enumerate(PROBABILITY_STEPS) if probability > bound), len(PROBABILITY_STEPS))
    return {**piece, "colour": colour, "title": title}


def printable(text: str) -> str:
    """Replace control characters by symbols, except for tabs and line ends."""
    return text.translate(CONTROLS | {9: "\t", 10: "\n", 13: "\n"})
