"""Perplexity of a model on an evaluation dataset, in the five modes of section 4.1 of the paper.

    evaluation_dataset = EvaluationDataset.build(corpus.tokens("test"), tokenizer_hash=…, r_max=0.6)
    evaluation = evaluate(model_method(lm.metadata), lm.engine(lm.mask), evaluation_dataset)
    evaluation.modes["training"].perplexity, evaluation.gains["training"].percent

Perplexity is exp of the mean negative log-probability over *all* asked tokens of the dataset, not a mean over texts or
batches, so it does not depend on how the texts are batched. Its 95 % interval estimates the variation over documents:
they are resampled with replacement, with the same resamples in every mode, so a gain is also computed on the same
documents. A text that has the end of one document and the beginning of another counts in part for each.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from acgpt.common.files import finite
from acgpt.engine.engine import Engine
from acgpt.engine.layout import batches
from acgpt.engine.modules import evaluating
from acgpt.errors import InputError
from acgpt.evaluation import distance
from acgpt.evaluation.bootstrap import (
    DOCUMENTS,
    LEVEL,
    MIN_DOCUMENTS,
    RESAMPLES,
    TEXTS,
    Difference,
    PerText,
    TextSums,
    percentiles,
    resampled_means,
)
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.distance import BinnedGain
from acgpt.evaluation.journal import Journal, as_line, continues, open_journal
from acgpt.methods import Method
from acgpt.models.language_model import positions_of
from acgpt.query.conditioning import ASKED, GIVEN
from acgpt.query.modes import MODES, WITHOUT_FUTURE, modes_named
from acgpt.query.query import Query

PAUSE = 10.0  # seconds between two batches of partial results
CPU_TOKENS = 1024  # per forward pass on a CPU: larger ones are no faster, and progress would be shown less often


@dataclass(frozen=True)
class ModeResult:
    """The result of a model in one mode.

    Args:
        perplexity: Perplexity per asked token, over all texts.
        interval: 95 % bootstrap interval of the perplexity, see `bootstrap`; `None` for fewer than `MIN_UNITS` units,
            and if a perplexity is infinite.
        mean_nll: Logarithm of the perplexity: mean negative log-probability of an asked token, in nats.
        tokens: Number of asked tokens.
        texts: Number of texts.
    """

    perplexity: float
    interval: tuple[float, float] | None
    mean_nll: float
    tokens: int
    texts: int


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of an evaluation in every requested mode.

    Args:
        method: Name of the method.
        evaluation_dataset: The evaluation dataset.
        log_probs: For each answered mode, (texts, length) log-probabilities; NaN where nothing was asked.
        unanswered: Modes that the method cannot answer.
        seed: Seed of the resampling.
        bound: Whether the log-probabilities are lower bounds, and the perplexities upper bounds.
    """

    method: str
    evaluation_dataset: EvaluationDataset
    log_probs: Mapping[str, np.ndarray]
    unanswered: tuple[str, ...]
    seed: int
    bound: bool = False

    @cached_property
    def units(self) -> tuple[str, np.ndarray]:
        """What is resampled: documents if there are `MIN_DOCUMENTS`, else texts; (texts, length) numbers from 0."""
        documents = self.evaluation_dataset.document_numbers
        if documents is not None and documents[-1, -1] + 1 >= MIN_DOCUMENTS:
            return DOCUMENTS, documents
        count, length = self.evaluation_dataset.tokens.shape
        return TEXTS, np.arange(count).repeat(length).reshape(count, length)

    @cached_property
    def per_text(self) -> PerText:
        """Sums of each unit, from which the perplexities are computed."""
        sums = {mode: self.sums(-log_probs) for mode, log_probs in self.log_probs.items()}
        return PerText(self.evaluation_dataset.hash, sums, self.units[0])

    def sums(self, nats: np.ndarray) -> TextSums:
        """Return the sums over each unit of (texts, length) values, without those that are NaN."""
        present, (_, numbers) = ~np.isnan(nats), self.units
        units, numbers = int(numbers[-1, -1]) + 1, numbers[present]
        counts = np.bincount(numbers, minlength=units).astype(np.float64)
        return TextSums(np.bincount(numbers, nats[present], units), counts)

    @cached_property
    def resampled(self) -> dict[str, np.ndarray]:
        """For each mode, (resamples,) mean NLLs of resampled units; the same resamples in every mode."""
        return resampled_means(self.per_text.modes, self.seed)

    @cached_property
    def modes(self) -> dict[str, ModeResult | None]:
        """Results by mode, in the paper's order; `None` for modes that the method cannot answer."""
        results: dict[str, ModeResult | None] = dict.fromkeys(self.unanswered)
        for mode, sums in self.per_text.modes.items():
            nll, count, texts = float(sums.nats.sum()), float(sums.tokens.sum()), len(self.evaluation_dataset)
            interval = percentiles(np.exp(self.resampled[mode]), self.per_text.units)
            results[mode] = ModeResult(float(np.exp(nll / count)), interval, nll / count, int(count), texts)
        return {mode.name: results[mode.name] for mode in modes_named(tuple(results))}

    @cached_property
    def gains(self) -> dict[str, Difference | None]:
        """Gain from the future in each mode that reads it; `None` if one mode of the pair was not answered."""
        gains: dict[str, Difference | None] = {}
        for mode, without in WITHOUT_FUTURE.items():
            with_future, without_future = self.modes.get(mode), self.modes.get(without)
            gains[mode] = None
            if with_future is not None and without_future is not None:
                resampled = 100 * -np.expm1(self.resampled[mode] - self.resampled[without])
                percent = float(100 * -np.expm1(with_future.mean_nll - without_future.mean_nll))
                gains[mode] = Difference(percent, percentiles(resampled, self.per_text.units))
        return gains

    @cached_property
    def by_distance(self) -> dict[str, dict[str, dict[str, BinnedGain]] | None]:
        """Gain from the future by "distance" and by "run", see `distance`, in each mode that reads it.

        `None` as in `gains`; bins without tokens are missing.
        """
        return {mode: None if gain is None else self.binned_gains(mode) for mode, gain in self.gains.items()}

    def binned_gains(self, mode: str) -> dict[str, dict[str, BinnedGain]]:
        """Return the gains of one mode by bin."""
        roles = self.evaluation_dataset.roles(MODES[mode])
        nats, without = -self.log_probs[mode], -self.log_probs[WITHOUT_FUTURE[mode]]
        with np.errstate(invalid="ignore"):  # both can be infinite
            gains = without - nats
        numbers = {"distance": distance.next_given(roles), "run": distance.run_lengths(roles)}
        sums: dict[tuple[str, str], list[TextSums]] = {}
        for name, values in numbers.items():
            belongs = distance.bins(values)
            for number, label in enumerate(distance.LABELS):
                parts = [self.sums(np.where(belongs == number, part, np.nan)) for part in (nats, without, gains)]
                if parts[0].tokens.any():
                    sums[name, label] = parts
        resampled = resampled_means({" ".join(key): parts[-1] for key, parts in sums.items()}, self.seed)
        results: dict[str, dict[str, BinnedGain]] = {name: {} for name in numbers}
        for (name, label), parts in sums.items():
            tokens = int(parts[0].tokens.sum())
            with_future, without_future = (float(part.nats.sum() / tokens) for part in parts[:2])
            gain, means = without_future - with_future, resampled[f"{name} {label}"]
            units = int((parts[0].tokens > 0).sum())
            # In some resamples, no unit has a token of a rare bin.
            interval = percentiles(means[~np.isnan(means)], units) if math.isfinite(gain) else None
            results[name][label] = BinnedGain(tokens, with_future, without_future, gain, interval)
        return results

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values; infinite numbers become `None`."""

        def as_json(results: Any) -> Any:
            if isinstance(results, ModeResult | Difference | BinnedGain):
                return finite(asdict(results))
            return results and {key: as_json(result) for key, result in results.items()}

        return {
            "method": self.method,
            "bound": self.bound,
            "set": self.evaluation_dataset.as_dict(),
            "modes": as_json(self.modes),
            "gains": as_json(self.gains),
            "by_distance": as_json(self.by_distance),
            "bootstrap": {
                "resamples": RESAMPLES,
                "level": LEVEL,
                "seed": self.seed,
                "unit": self.per_text.unit,
                "units": self.per_text.units,
            },
        }

    def records(self) -> dict[str, np.ndarray]:
        """Return every asked token of every mode as columns: `MODE.text`, `.position`, `.token` and `.log_prob`.

        Texts are counted from 0, positions within a text from 1.
        """
        columns = {}
        for mode, log_probs in self.log_probs.items():
            text, column = np.nonzero(~np.isnan(log_probs))
            columns[f"{mode}.text"] = text.astype(np.int32)
            columns[f"{mode}.position"] = (column + 1).astype(np.int32)
            columns[f"{mode}.token"] = self.evaluation_dataset.tokens[text, column]
            columns[f"{mode}.log_prob"] = log_probs[text, column]
        return columns


def partial_path(output: Path) -> Path:
    """Return the path of the partial results of an evaluation."""
    return output.with_name(f"{output.name}.part")


class PartialEvaluation:
    """The answers of an evaluation in a journal, from which it resumes after an interruption.

    It is a context manager: the journal is locked inside, and an error or an interrupt adds the last answers.

    Args:
        path: Path of the journal. Answers are added at intervals, so a short evaluation has none. If it cannot be
            written, there is a warning, and the evaluation continues without it.
        config: Returns everything that determines the answers; called only if the journal exists or is written. A
            journal with another config is replaced when the first answers are written.

    Raises:
        InputError: Another process evaluates into this journal.
    """

    def __init__(self, path: Path, config: Callable[[], Mapping[str, Any]]) -> None:
        self.path, self.config = path, cache(config)
        self.answers: dict[str, dict[int, np.ndarray]] = {}  # by roles and number of the text
        self.pending: list[bytes] = []  # entries that the journal lacks
        self.earlier = 0.0  # seconds that earlier attempts took
        self.pause = PAUSE  # seconds between two batches
        self.journal: Journal | None = None
        self.stack = ExitStack()
        self.started = self.written = time.monotonic()

    def __enter__(self) -> PartialEvaluation:
        if self.path.exists():
            with self.disk_errors():
                if continues(self.path, self.config()):
                    self.earlier = self.open().costs.get("seconds", 0.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.write()
        self.stack.close()

    def open(self) -> Journal:
        """Open the journal, and read the answers in it."""
        if self.journal is None:
            self.journal = self.stack.enter_context(open_journal(self.path, self.config(), replace=True))
            for entry in map(json.loads, self.journal.entries()):
                log_probs = np.frombuffer(base64.b64decode(entry["log_probs"]), "<f8")
                self.answers.setdefault(entry["roles"], {})[entry["text"]] = log_probs
        return self.journal

    @property
    def seconds(self) -> float:
        """Duration of the evaluation so far, including earlier attempts."""
        return self.earlier + time.monotonic() - self.started

    def add(self, roles: str, answers: Mapping[int, np.ndarray]) -> None:
        """Add a group's answers to the next batch, which is written `pause` seconds after the last one."""
        if self.pause < math.inf:
            for text, log_probs in answers.items():
                encoded = base64.b64encode(log_probs.astype("<f8").tobytes()).decode()  # exact, quicker than digits
                self.pending.append(as_line({"roles": roles, "text": text, "log_probs": encoded}))
            if time.monotonic() - self.written >= self.pause:
                self.write()

    def write(self) -> None:
        """Write the answers that the journal lacks."""
        if self.pending:
            with self.disk_errors():
                journal = self.open()
                journal.add(self.pending, {"seconds": self.seconds - journal.costs.get("seconds", 0.0)})
            self.pending, self.written = [], time.monotonic()

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn an `OSError` into a warning, and go on without the journal."""
        try:
            yield
        except OSError as error:
            warnings.warn(
                f"cannot write {self.path}: {error.strerror or error}. This evaluation cannot be resumed if it stops.",
                stacklevel=2,
            )
            self.pause = math.inf
            with suppress(OSError):  # to close the journal is to write what its buffer still holds
                self.stack.close()

    def discard(self) -> None:
        """Delete the journal after the final results have been written."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def pass_tokens(engine: Engine) -> int:
    """Return the default of the maximum number of tokens per forward pass of an evaluation."""
    return min(engine.budget, CPU_TOKENS) if engine.model.device.type == "cpu" else engine.budget


def evaluate(
    method: Method,
    engine: Engine,
    evaluation_dataset: EvaluationDataset,
    *,
    modes: Sequence[str] = (),
    seed: int = 0,
    budget: int | None = None,
    progress: Callable[[int, int, int], object] = lambda done, all, new: None,
    unfinished: PartialEvaluation | None = None,
) -> Evaluation:
    """Evaluate a model. It may be in training: its train/eval mode is restored, and no gradients are computed.

    Args:
        method: How the model is asked.
        engine: The model, its BOS and MASK.
        evaluation_dataset: The evaluation dataset.
        modes: Names of modes. Default: all five. A mode that the method cannot answer has no result.
        seed: Seed of the bootstrap intervals.
        budget: Maximum number of tokens per forward pass. The result does not depend on it, except for rounding.
        progress: Called with the number of tokens of answered texts and the total, over all passes, and with how many
            of them were answered by this call.
        unfinished: Partial results to resume from and to write to.
    """
    requested = modes_named(modes)
    check_fit(engine.model, evaluation_dataset, method.overhead)
    passes: dict[str, list[Query]] = {}  # by a hash of the roles: modes that show the model the same share a pass
    shown: dict[str, str] = {}  # the pass of each mode that can be answered
    for mode in requested:
        asked = evaluation_dataset.roles(mode)
        roles = mode.model_roles(asked)
        name = hashlib.sha256(roles.tobytes()).hexdigest()[:16]
        queries = passes.get(name) or queries_of(evaluation_dataset.tokens, roles)
        all_counted = np.array_equal(roles == ASKED, asked == ASKED)
        if (all_counted or method.chain) and all(map(method.answers, queries)):
            passes[name], shown[mode.name] = queries, name

    answers: dict[str, np.ndarray] = {}
    budget, length = budget or pass_tokens(engine), evaluation_dataset.length
    done, new, total = 0, 0, len(evaluation_dataset) * length * len(passes)
    progress(done, total, new)
    with torch.no_grad(), evaluating(engine.model):
        for name, queries in passes.items():
            scores = {} if unfinished is None else dict(unfinished.answers.get(name, {}))
            groups = split_groups(batches(dict(enumerate(queries)), budget, future=True), method.texts_at_once)
            # A text's rounding depends on its group, so groups are those of a run that is not resumed.
            remaining = [group for group in groups if not scores.keys() >= set(group)]
            done += length * (len(queries) - sum(map(len, remaining)))
            progress(done, total, new)
            for group in remaining:
                results = method.log_probs(engine, [queries[i] for i in group])
                scored = {i: np.array(result, dtype=np.float64) for i, result in zip(group, results, strict=True)}
                scores |= scored
                if unfinished is not None:
                    unfinished.add(name, scored)
                done, new = done + length * len(group), new + length * len(group)
                progress(done, total, new)
            answers[name] = np.full(evaluation_dataset.tokens.shape, np.nan)
            for i, query in enumerate(queries):
                answers[name][i, query.asked_at - 1] = scores[i]

    log_probs = {
        mode.name: np.where(evaluation_dataset.roles(mode) == ASKED, answers[shown[mode.name]], np.nan)
        for mode in requested
        if mode.name in shown
    }
    unanswered = tuple(mode.name for mode in requested if mode.name not in shown)
    return Evaluation(method.name, evaluation_dataset, log_probs, unanswered, seed, method.bound)


def check_fit(model: PreTrainedModel, evaluation_dataset: EvaluationDataset, overhead: int) -> None:
    """Refuse texts that exceed the model's context, and token ids outside its vocabulary."""
    config = model.config.get_text_config()
    if evaluation_dataset.length + overhead > (positions := positions_of(config)):
        raise InputError(
            f"the texts have {evaluation_dataset.length} tokens, but the model has {positions} positions, including "
            f"BOS: use `length={positions - overhead}` or less."
        )
    if (highest := int(evaluation_dataset.tokens.max())) >= config.vocab_size:
        raise InputError(f"the texts contain token {highest}, but the model's ids end at {config.vocab_size - 1}.")


def split_groups(groups: Sequence[Sequence[int]], most: int | None) -> Iterator[Sequence[int]]:
    """Split groups so that none has more than `most` items."""
    for group in groups:
        for start in range(0, len(group), most or len(group)):
            yield group[start : start + (most or len(group))]


def queries_of(tokens: np.ndarray, roles: np.ndarray) -> list[Query]:
    """Return one query per row of (texts, length) tokens and roles."""
    rows = zip(tokens.tolist(), (roles == GIVEN).tolist(), (roles == ASKED).tolist(), strict=True)
    return [Query(*row) for row in rows]
