"""Perplexity in the five modes of section 4.1, of one model on one evaluation set.

    evaluation_set = EvaluationSet.build(corpus.tokens("test"), tokenizer_hash=…, r_max=0.6)
    evaluation = evaluate(model_method(lm.metadata), lm.engine(lm.mask), evaluation_set)
    evaluation.modes["training"].perplexity, evaluation.gains["training"].percent

Perplexity is exp of the mean negative log-probability over *all* asked tokens of the set, not a mean over texts or
batches, so it does not depend on how the texts are batched. Its 95 % interval says what another draw of texts would
have given: texts are resampled with replacement, the same ones for every mode, so that a gain is compared on the same
texts too.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedModel

from acgpt.common.files import write_whole
from acgpt.engine.attention import evaluating
from acgpt.engine.engine import Engine
from acgpt.engine.layout import batches
from acgpt.errors import InputError
from acgpt.evaluation.bootstrap import LEVEL, RESAMPLES, Difference, PerText, TextSums, percentiles, resampled_means
from acgpt.evaluation.dataset import EvaluationSet
from acgpt.methods import Method
from acgpt.models.language_model import positions_of
from acgpt.query.conditioning import ASKED, GIVEN
from acgpt.query.modes import WITHOUT_FUTURE, modes_named
from acgpt.query.query import Query

PAUSE, SHARE = 10.0, 0.05  # between two writes of unfinished answers: seconds; and of the time, at most this for them


@dataclass(frozen=True)
class ModeResult:
    """A model in one mode.

    Args:
        perplexity: Per asked token of the whole set.
        interval: 95 % of the perplexities of resampled texts lie in it; `None` for a single text, and where
            a perplexity is infinite.
        mean_nll: Its logarithm: the mean negative log-probability of an asked token, in nats.
        tokens: How many tokens were asked.
        texts: In how many texts.
    """

    perplexity: float
    interval: tuple[float, float] | None
    mean_nll: float
    tokens: int
    texts: int


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result: of every mode that was wanted, `None` where the method cannot answer it.

    Args:
        method: The method's name.
        evaluation_set: What was asked.
        log_probs: For each mode that was answered, (texts, length) log-probabilities; NaN where nothing was asked.
        unanswered: The modes that the method cannot answer.
        seed: Of the resampling.
        bound: Are the log-probabilities lower bounds, and so the perplexities upper bounds?
    """

    method: str
    evaluation_set: EvaluationSet
    log_probs: Mapping[str, np.ndarray]
    unanswered: tuple[str, ...]
    seed: int
    bound: bool = False

    @cached_property
    def per_text(self) -> PerText:
        """What each perplexity is made of, text by text."""
        sums = {mode: text_sums(log_probs) for mode, log_probs in self.log_probs.items()}
        return PerText(self.evaluation_set.hash, sums)

    @cached_property
    def resampled(self) -> dict[str, np.ndarray]:
        """For each mode, the `RESAMPLES` mean NLLs of resampled texts, the same texts in every mode."""
        return resampled_means(self.per_text.modes, self.seed)

    @cached_property
    def modes(self) -> dict[str, ModeResult | None]:
        """The results by mode, in the paper's order."""
        results: dict[str, ModeResult | None] = dict.fromkeys(self.unanswered)
        for mode, sums in self.per_text.modes.items():
            nll, count, texts = float(sums.nats.sum()), float(sums.tokens.sum()), len(sums.nats)
            interval = percentiles(np.exp(self.resampled[mode]), texts)
            results[mode] = ModeResult(float(np.exp(nll / count)), interval, nll / count, int(count), texts)
        return {mode.name: results[mode.name] for mode in modes_named(tuple(results))}

    @cached_property
    def gains(self) -> dict[str, Difference | None]:
        """What the future is worth to the modes that read it; `None` where one of a pair was not answered."""
        gains: dict[str, Difference | None] = {}
        for mode, without in WITHOUT_FUTURE.items():
            one, other = self.modes.get(mode), self.modes.get(without)
            gains[mode] = None
            if one is not None and other is not None:
                resampled = 100 * -np.expm1(self.resampled[mode] - self.resampled[without])
                percent = float(100 * -np.expm1(one.mean_nll - other.mean_nll))
                gains[mode] = Difference(percent, percentiles(resampled, one.texts))
        return gains

    def as_dict(self) -> dict[str, Any]:
        """For programs, as JSON has it: what is infinite is `None`."""

        def plain(result: ModeResult | Difference | None) -> dict[str, Any] | None:
            if result is None:
                return None
            return {name: value if finite(value) else None for name, value in asdict(result).items()}

        def finite(value: Any) -> bool:
            return not isinstance(value, float) or math.isfinite(value)

        return {
            "method": self.method,
            "bound": self.bound,
            "set": self.evaluation_set.as_dict(),
            "modes": {mode: plain(result) for mode, result in self.modes.items()},
            "gains": {mode: plain(gain) for mode, gain in self.gains.items()},
            "bootstrap": {"resamples": RESAMPLES, "level": LEVEL, "seed": self.seed},
        }

    def records(self) -> dict[str, np.ndarray]:
        """Every asked token of every mode as columns: `MODE.text`, `.position`, `.token` and `.log_prob`.

        Texts count from 0, positions within a text from 1.
        """
        columns = {}
        for mode, log_probs in self.log_probs.items():
            text, place = np.nonzero(~np.isnan(log_probs))
            columns[f"{mode}.text"] = text.astype(np.int32)
            columns[f"{mode}.position"] = (place + 1).astype(np.int32)
            columns[f"{mode}.token"] = self.evaluation_set.tokens[text, place]
            columns[f"{mode}.log_prob"] = log_probs[text, place]
        return columns


class Unfinished:
    """What an evaluation has answered so far, in a file: after it was stopped, it goes on from there.

    Args:
        path: Of the file. It is written from time to time, so that a short evaluation has none; if the disk refuses it,
            that is said, and the evaluation goes on without.
        about: Says what decides the answers; asked only where there is a file, or is to be one. A file of another
            evaluation is not read, and is replaced.
    """

    def __init__(self, path: Path, about: Callable[[], Mapping[str, Any]]) -> None:
        self.path, self.ask = path, about
        self.answers: dict[str, np.ndarray] = {}
        self.earlier, self.pause = 0.0, PAUSE  # seconds: what it took before this time, and between two writes
        if path.exists():
            with suppress(OSError, SafetensorError, KeyError, ValueError):  # what is no such file is begun anew
                self.read()
        self.begun = self.written = time.monotonic()

    def read(self) -> None:
        """Take what is there, if it is of this evaluation, and whole."""
        with safe_open(self.path, "np") as file:
            said = file.metadata() or {}
            found = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
        if (said["about"], said["sha256"]) == (self.about, fingerprint(found)):
            self.answers, self.earlier = found, float(said["seconds"])

    @cached_property
    def about(self) -> str:
        """What the file says of itself."""
        return json.dumps(self.ask(), sort_keys=True)

    @property
    def seconds(self) -> float:
        """That it has taken, with the times before."""
        return self.earlier + time.monotonic() - self.begun

    def of(self, shown: bytes, shape: tuple[int, ...]) -> np.ndarray:
        """(texts, length) the answers to what is shown, to be filled in; NaN where there is none yet."""
        name = hashlib.sha256(shown).hexdigest()
        found = self.answers.get(name)
        if found is None or found.shape != shape or found.dtype != np.float64:
            self.answers[name] = np.full(shape, np.nan)
        return self.answers[name]

    def write(self) -> None:
        """Have the disk hold what there is, if it was long ago that it did."""
        begun = time.monotonic()
        if begun - self.written < self.pause:
            return
        about = {"about": self.about, "sha256": fingerprint(self.answers), "seconds": str(self.seconds)}
        try:
            write_whole(self.path, save(self.answers, metadata=about))
            self.written = time.monotonic()
            self.pause = max(PAUSE, (self.written - begun) / SHARE)
        except OSError as error:
            warnings.warn(
                f"cannot write {self.path}: {error.strerror or error}. If this evaluation is stopped, it cannot go on.",
                stacklevel=2,
            )
            self.pause = math.inf

    def discard(self) -> None:
        """All is answered, and kept elsewhere."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
    """Of their contents."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(name.encode() + arrays[name].tobytes())
    return found.hexdigest()


def evaluate(
    method: Method,
    engine: Engine,
    evaluation_set: EvaluationSet,
    *,
    modes: Sequence[str] = (),
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda done, all: None,
    unfinished: Unfinished | None = None,
) -> Evaluation:
    """Evaluate a model, a training one too: it is left in the mode that it was in, and no gradient is kept.

    Args:
        method: How the model is asked.
        engine: The model, its BOS and MASK. The result does not depend on its budget, but for rounding.
        evaluation_set: What it is asked.
        modes: Names of modes; by default all five. One the method cannot answer has no result.
        seed: Of the resampling behind the intervals.
        progress: Called with the number of texts answered so far and the number of all, over all passes.
        unfinished: What was answered before, and where to keep what is answered now.
    """
    wanted = modes_named(modes)
    check_fit(engine.model, evaluation_set, method.overhead)
    passes: dict[bytes, list[Query]] = {}  # by what is shown: modes that show the same are answered together
    shown = {mode.name: mode.shown(evaluation_set.roles(mode)) for mode in wanted}
    unanswered = []
    for mode in wanted:
        name, roles = mode.name, shown[mode.name]
        queries = passes.get(roles.tobytes()) or queries_of(evaluation_set.tokens, roles)
        whole = np.array_equal(roles == ASKED, evaluation_set.roles(mode) == ASKED)  # is all that is answered counted?
        if (whole or method.chain) and all(map(method.answers, queries)):
            passes[roles.tobytes()] = queries
        else:
            unanswered.append(name)

    answers: dict[bytes, np.ndarray] = {}
    done, total = 0, len(evaluation_set) * len(passes)
    progress(done, total)
    with torch.no_grad(), evaluating(engine.model):
        for key, queries in passes.items():
            shape = evaluation_set.tokens.shape
            answers[key] = np.full(shape, np.nan) if unfinished is None else unfinished.of(key, shape)
            missing = (np.array([query.asked for query in queries]) & np.isnan(answers[key])).any(1)
            left = {i: query for i, query in enumerate(queries) if missing[i]}
            done += len(queries) - len(left)
            progress(done, total)
            for group in few_at_once(batches(left, engine.budget, future=True), method.texts_at_once):
                asked = [queries[i] for i in group]
                scores = method.log_probs(engine, asked)
                for i, query, score in zip(group, asked, scores, strict=True):
                    answers[key][i, np.asarray(query.asked_positions) - 1] = score
                done += len(group)
                progress(done, total)
                if unfinished is not None:
                    unfinished.write()

    log_probs = {
        mode.name: np.where(evaluation_set.roles(mode) == ASKED, answers[shown[mode.name].tobytes()], np.nan)
        for mode in wanted
        if mode.name not in unanswered
    }
    return Evaluation(method.name, evaluation_set, log_probs, tuple(unanswered), seed, method.bound)


def check_fit(model: PreTrainedModel, evaluation_set: EvaluationSet, overhead: int) -> None:
    """Refuse texts that are longer than the model's context, and tokens that it has not."""
    config = model.config.get_text_config()
    if evaluation_set.length + overhead > (positions := positions_of(config)):
        raise InputError(
            f"the texts have {evaluation_set.length} tokens; the model has {positions} positions, one of them for BOS: "
            f"use `length={positions - overhead}` or less."
        )
    if (highest := int(evaluation_set.tokens.max())) >= config.vocab_size:
        raise InputError(f"the texts have the token {highest}, but the model's ids end at {config.vocab_size - 1}.")


def few_at_once(groups: Sequence[Sequence[int]], most: int | None) -> Iterator[Sequence[int]]:
    """Groups of at most so many."""
    for group in groups:
        for start in range(0, len(group), most or len(group)):
            yield group[start : start + (most or len(group))]


def queries_of(tokens: np.ndarray, roles: np.ndarray) -> list[Query]:
    """A query a row, (texts, length) tokens and their roles."""
    rows = zip(tokens.tolist(), (roles == GIVEN).tolist(), (roles == ASKED).tolist(), strict=True)
    return [Query(*row) for row in rows]


def text_sums(log_probs: np.ndarray) -> TextSums:
    """For each text the sum of the asked tokens' negative log-probabilities, and their number."""
    return TextSums(-np.nansum(log_probs, axis=1), (~np.isnan(log_probs)).sum(axis=1).astype(np.float64))
