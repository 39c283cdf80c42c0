"""Metrics of generated tokens that need no features: diversity, repetition, and perplexity under a judge.

    distinct-n      share of distinct n-grams among all n-grams of asked tokens (Li et al., 2016). It falls with the
                    amount of text, so only the first sample of each text counts: as many tokens as in the original
    repetition      share of 4-grams of a sample that occurred before in it (seq-rep-4 of Welleck et al., 2020), mean
                    over samples
    loops           share of samples that end in a loop: at least three copies of a block of at most 64 tokens, with
                    at least 16 tokens in total

An n-gram lies within one run of asked tokens; none spans given tokens. Loops are detected at the last asked token, with
everything before it, given or not.

A judge is a language model that scores the texts (`judge_samples`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from acgpt.errors import InputError
from acgpt.evaluation.generations import Generation
from acgpt.query.query import Query

if TYPE_CHECKING:
    from acgpt.models.language_model import LanguageModel

ORDERS = (1, 2, 3)
REPEATED = 4
BLOCK, COPIES, LOOP = 64, 3, 16
BATCH = 16  # texts per call of the judge


def ngrams(tokens: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    """Yield the n-grams of a sequence."""
    return (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def distinct(samples: Sequence[Generation], n: int) -> float | None:
    """Return the share of distinct n-grams among all n-grams of asked tokens; `None` if there are none."""
    grams = [gram for sample in samples for run in sample.runs for gram in ngrams(run, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(samples: Sequence[Generation]) -> float | None:
    """Return the share of repeated 4-grams, as a mean over the samples that have any 4-gram."""
    shares = []
    for sample in samples:
        if grams := [gram for run in sample.runs for gram in ngrams(run, REPEATED)]:
            shares.append(1 - len(set(grams)) / len(grams))
    return math.fsum(shares) / len(shares) if shares else None


def ends_in_loop(tokens: Sequence[int | None]) -> bool:
    """Return whether tokens end in at least three copies of a block, with at least 16 tokens in total."""
    for period in range(1, min(BLOCK, len(tokens) // COPIES) + 1):
        same = 0  # tokens, counted from the end, that equal the token one period before
        while same + period < len(tokens) and tokens[-1 - same] == tokens[-1 - same - period] is not None:
            same += 1
        if same + period >= max(COPIES * period, LOOP):
            return True
    return False


def loops(samples: Sequence[Generation]) -> float:
    """Return the share of samples with a loop that ends at the last asked token."""
    return sum(ends_in_loop(sample.tokens[: sample.roles.rindex("a") + 1]) for sample in samples) / len(samples)


def own_perplexity(samples: Sequence[Generation]) -> float | None:
    """Return the perplexity of the asked tokens under their own model, at temperature 1; `None` if unknown."""
    if any(sample.log_probs is None for sample in samples):
        return None
    return perplexity([log_prob for sample in samples for log_prob in sample.log_probs or ()])


def perplexity(log_probs: Sequence[float]) -> float:
    """Return exp of the mean negative log-probability."""
    try:
        return math.exp(-math.fsum(log_probs) / len(log_probs))
    except OverflowError:
        return math.inf


def companions(samples: Sequence[Generation]) -> dict[str, float | None]:
    """Return all metrics by their keys in results."""
    first = first_samples(samples)
    metrics: dict[str, float | None] = {f"distinct_{n}": distinct(first, n) for n in ORDERS}
    return metrics | {"repetition": repetition(samples), "loops": loops(samples)}


def first_samples(samples: Sequence[Generation]) -> list[Generation]:
    """Return the first sample of each text."""
    first: dict[tuple[int, str], Generation] = {}
    for sample in samples:
        first.setdefault((sample.item, sample.roles), sample)
    return list(first.values())


def with_tokens(sample: Generation, tokens: Sequence[int], fills: Sequence[str], text: str) -> Generation:
    """Return the same query with other tokens in the asked positions, for example the original ones."""
    filled = [new if role == "a" else old for new, old, role in zip(tokens, sample.tokens, sample.roles, strict=True)]
    return replace(sample, tokens=tuple(filled), log_probs=None, fills=tuple(fills), text=text)


# ---- a judge --------------------------------------------------------------------------------------------------------


def judge_samples(
    lm: LanguageModel,
    samples: Sequence[Generation],
    same_tokens: bool,
    progress: Callable[[int, int], object] = lambda done, all: None,
) -> dict[str, Any]:
    """Score samples with a language model, the judge.

    A judge that reads the future measures exactly what was asked: log p(fills | everything given). A causal judge
    cannot, so it measures log p(whole text), including given tokens: how likely such a text is, not how well the fills
    fit. Its number is for comparing samples of the same queries.

    Args:
        lm: The judge.
        samples: The samples.
        same_tokens: Whether the judge has the tokenizer of the samples. A judge that reads the future must have it;
            a causal judge tokenises the texts again.
        progress: Called with the number of judged samples and the total.

    Returns:
        measures ("fills given the rest" or "whole text"), perplexity (per token), log_prob (total, in nats), tokens,
        cut (number of tokens beyond the positions of a causal judge), and bound (whether the log-probability is a lower
        bound).

    Raises:
        InputError: See `check_judge`.
    """
    room, cut = lm.positions - 1, 0
    if lm.reads_future:
        check_judge(lm, same_tokens, max(len(sample.tokens) for sample in samples))
        queries = [Query(sample.tokens, role_mask(sample, "g"), role_mask(sample, "a")) for sample in samples]
    else:
        texts = [
            list(sample.tokens)
            if same_tokens and None not in sample.tokens
            else lm.tokenizer(sample.text, add_special_tokens=False)["input_ids"]
            for sample in samples
        ]
        cut = sum(max(0, len(text) - room) for text in texts)
        queries = [Query(text[:room], [False] * len(text[:room])) for text in texts if text]
    log_probs: list[float] = []
    bound = False
    progress(0, len(queries))
    for start in range(0, len(queries), BATCH):
        scores = lm.log_prob(queries[start : start + BATCH], future=lm.reads_future)
        log_probs += [token.log_prob for score in scores for token in score.tokens]
        bound = bound or any(score.bound for score in scores)
        progress(min(start + BATCH, len(queries)), len(queries))
    return {
        "measures": "fills given the rest" if lm.reads_future else "whole text",
        "perplexity": perplexity(log_probs),
        "log_prob": math.fsum(log_probs),
        "tokens": len(log_probs),
        "cut": cut,
        "bound": bound,
    }


def check_judge(lm: LanguageModel, same_tokens: bool, longest: int) -> None:
    """Check that a model can judge texts of up to `longest` tokens.

    Raises:
        InputError: The model reads the future, but has another tokenizer or too few positions.
    """
    if lm.reads_future and not same_tokens:
        raise InputError(
            "the judge has another tokenizer than the generations, so it cannot score their tokens. Use a judge with "
            "the same tokenizer, or a causal one."
        )
    if lm.reads_future and longest > lm.positions - 1:
        raise InputError(
            f"the judge has positions for texts of {lm.positions - 1} tokens, but the generations have {longest}: use "
            "a judge with more."
        )


def role_mask(sample: Generation, role: str) -> list[bool]:
    """Return for each token whether it has this role."""
    return [letter == role for letter in sample.roles]
