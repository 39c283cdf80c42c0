"""Perplexity of generated texts under another language model, the judge.

A judge that reads the future measures exactly what was asked: log p(fills | everything given). A causal judge cannot,
so it measures log p(whole text), including given tokens: how likely such a text is, not how well the fills fit. Its
number is for comparing samples of the same queries.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from acgpt.errors import InputError, ModelError
from acgpt.evaluation.generations import Generation
from acgpt.evaluation.perplexity import PartialEvaluation
from acgpt.evaluation.text_metrics import perplexity
from acgpt.methods import METHODS
from acgpt.models.language_model import LanguageModel
from acgpt.models.loading import is_default, load
from acgpt.models.metadata import tokenizer_hash, weights_hash
from acgpt.query.query import Query

Progress = Callable[[int, int], object]  # called with the number of processed texts and the total

BATCH = 16  # texts per call of the model


@dataclass(frozen=True, eq=False)
class Judge:
    """A language model that scores texts.

    Args:
        name: Name of the model, as the user passed it.
        lm: The model.
    """

    name: str
    lm: LanguageModel

    @classmethod
    def load(cls, name: str, device: str) -> Judge:
        """Load a judge. The embedded model is loaded without its adapter, as a causal model."""
        try:
            return cls(name, load(name, False if is_default(name) else None, device))
        except ModelError as error:
            raise ModelError(f"cannot load the judge: {error}") from error

    @cached_property
    def hash(self) -> str:
        """Hash of everything that determines the scores."""
        lm = self.lm
        method = None if lm.metadata is None else lm.metadata.method
        content = [weights_hash(lm.model), tokenizer_hash(lm.tokenizer), method, lm.bos, lm.mask]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def same_tokens(self, tokenizer: str) -> bool:
        """Return whether the judge has the tokenizer with this hash."""
        return tokenizer_hash(self.lm.tokenizer) == tokenizer

    def check(self, samples: Sequence[Generation], tokenizer: str) -> None:
        """Check that the judge can score samples that were made with this tokenizer.

        Raises:
            InputError: It reads the future, but has another tokenizer or too few positions.
        """
        if not self.lm.reads_future:
            return
        longest = max(len(sample.tokens) for sample in samples)
        if not self.same_tokens(tokenizer):
            raise InputError(
                "the judge has another tokenizer than the generations, so it cannot score their tokens. Use a judge "
                "with the same tokenizer, or a causal one."
            )
        if longest > self.lm.positions - 1:
            raise InputError(
                f"the judge has positions for texts of {self.lm.positions - 1} tokens, but the generations have "
                f"{longest}: use a judge with more."
            )

    def scores(
        self,
        samples: Sequence[Generation],
        tokenizer: str,
        progress: Progress = lambda done, all: None,
        unfinished: PartialEvaluation | None = None,
        side: str = "generated",
    ) -> dict[str, Any]:
        """Score samples that `check` accepts.

        Args:
            samples: The samples.
            tokenizer: Hash of their tokenizer. If it is another one, a causal judge tokenises the texts again.
            progress: Called with the number of judged samples and the total.
            unfinished: Partial results to resume from and to write to.
            side: What the samples are called in there.

        Returns:
            measures ("fills given the rest" or "whole text"), perplexity (per token), log_prob (total, in nats),
            tokens, cut (number of tokens beyond the positions of a causal judge), and bound (whether the
            log-probability is a lower bound).
        """
        lm, cut = self.lm, 0
        if lm.reads_future:
            masks = [[[letter == role for letter in sample.roles] for role in "ga"] for sample in samples]
            queries = [
                Query(sample.tokens, given, asked) for sample, (given, asked) in zip(samples, masks, strict=True)
            ]
        else:
            same, room = self.same_tokens(tokenizer), lm.positions - 1
            texts = [
                list(sample.tokens)
                if same and None not in sample.tokens
                else lm.tokenizer(sample.text, add_special_tokens=False)["input_ids"]
                for sample in samples
            ]
            cut = sum(max(0, len(text) - room) for text in texts)
            queries = [Query(text[:room], [False] * len(text[:room])) for text in texts if text]
        log_probs: list[float] = []
        known = {} if unfinished is None else unfinished.answers.get(side, {})
        progress(0, len(queries))
        for start in range(0, len(queries), BATCH):
            batch = dict(enumerate(queries[start : start + BATCH], start))
            if not known.keys() >= batch.keys():
                scores = lm.log_prob(list(batch.values()), future=lm.reads_future)
                new = {
                    i: np.array([token.log_prob for token in score.tokens])
                    for i, score in zip(batch, scores, strict=True)
                }
                known |= new
                if unfinished is not None:
                    unfinished.add(side, new)
            log_probs += [float(value) for i in batch for value in known[i]]
            progress(min(start + BATCH, len(queries)), len(queries))
        return {
            "measures": "fills given the rest" if lm.reads_future else "whole text",
            "perplexity": perplexity(log_probs),
            "log_prob": math.fsum(log_probs),
            "tokens": len(log_probs),
            "cut": cut,
            "bound": lm.metadata is not None and METHODS[lm.metadata.method].bound,
        }
