"""What generated tokens say of themselves, with no model of features: how varied they are, and whether they repeat.

    distinct-n      of all runs of n asked tokens, the share that are different ones (Li et al., 2016). It falls with
                    the amount of text, so that only the first sample of each text counts: as many tokens as in the
                    original
    repetition      of the runs of four tokens in a sample, the share that it had before (seq-rep-4 of Welleck et al.,
                    2020), on average over samples
    loops           the share of samples that end in a loop: at least three copies of a block of at most 64 tokens,
                    which together have at least 16

Runs of n tokens lie within one run of asked ones; none reaches over a gap. Whether a text ends in a loop is seen at its
last asked token, with all that stands before it, given or not.

A judge is a language model that says how likely it finds the text (`judged`).
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
BATCH = 16  # texts that a judge is asked at a time


def ngrams(tokens: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    """The runs of n tokens."""
    return (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def distinct(samples: Sequence[Generation], n: int) -> float | None:
    """The share of different ones among all runs of n asked tokens; `None` if there are none."""
    found = [each for sample in samples for run in sample.runs for each in ngrams(run, n)]
    return len(set(found)) / len(found) if found else None


def repetition(samples: Sequence[Generation]) -> float | None:
    """The share of runs of four that a sample had before, on average over those that have any."""
    shares = []
    for sample in samples:
        if found := [each for run in sample.runs for each in ngrams(run, REPEATED)]:
            shares.append(1 - len(set(found)) / len(found))
    return math.fsum(shares) / len(shares) if shares else None


def ends_in_loop(tokens: Sequence[int | None]) -> bool:
    """Does it end in at least three copies of a block, of at least 16 tokens together?"""
    for period in range(1, min(BLOCK, len(tokens) // COPIES) + 1):
        same = 0  # how many tokens, from the end, are the one that stands a period before
        while same + period < len(tokens) and tokens[-1 - same] == tokens[-1 - same - period] is not None:
            same += 1
        if same + period >= max(COPIES * period, LOOP):
            return True
    return False


def loops(samples: Sequence[Generation]) -> float:
    """The share of samples whose last asked token ends a loop."""
    return sum(ends_in_loop(each.tokens[: each.roles.rindex("a") + 1]) for each in samples) / len(samples)


def own_perplexity(samples: Sequence[Generation]) -> float | None:
    """Of the asked tokens under the model that drew them, at temperature 1; `None` where it does not say."""
    if any(sample.log_probs is None for sample in samples):
        return None
    return perplexity([each for sample in samples for each in sample.log_probs or ()])


def perplexity(log_probs: Sequence[float]) -> float:
    """Exp of the mean negative log-probability."""
    try:
        return math.exp(-math.fsum(log_probs) / len(log_probs))
    except OverflowError:
        return math.inf


def companions(samples: Sequence[Generation]) -> dict[str, float | None]:
    """All of them, by the names that results have."""
    first = firsts(samples)
    found: dict[str, float | None] = {f"distinct_{n}": distinct(first, n) for n in ORDERS}
    return found | {"repetition": repetition(samples), "loops": loops(samples)}


def firsts(samples: Sequence[Generation]) -> list[Generation]:
    """The first sample of each text."""
    found: dict[tuple[int, str], Generation] = {}
    for each in samples:
        found.setdefault((each.item, each.roles), each)
    return list(found.values())


def with_tokens(sample: Generation, tokens: Sequence[int], fills: Sequence[str], text: str) -> Generation:
    """The same question with other tokens where it asks: the original ones, say."""
    filled = [new if role == "a" else old for new, old, role in zip(tokens, sample.tokens, sample.roles, strict=True)]
    return replace(sample, tokens=tuple(filled), log_probs=None, fills=tuple(fills), text=text)


# ---- a judge --------------------------------------------------------------------------------------------------------


def judged(
    lm: LanguageModel,
    samples: Sequence[Generation],
    same_tokens: bool,
    progress: Callable[[int, int], object] = lambda done, all: None,
) -> dict[str, Any]:
    """How likely a language model finds what was drawn.

    A judge that reads the future measures what was asked: log p(fills | all that is given), exactly. One that reads
    left to right cannot, so it measures log p(whole text), given tokens included: how likely such a text is, not how
    well the fills fit. Its number is for comparing samples of the same questions with each other.

    Args:
        lm: The judge.
        samples: What was drawn.
        same_tokens: Has the judge the tokenizer of the samples? It must, to read the future; a text is otherwise
            tokenised by the judge's own.
        progress: Called with how many samples are judged, and of how many.

    Returns:
        measures ("fills given the rest" or "whole text"), perplexity (a token), log_prob (nats, of all), tokens, cut
        (how many more a causal judge had no positions for), and bound: is the log-probability only a lower bound?

    Raises:
        InputError: As `check_judge`.
    """
    room, cut = lm.positions - 1, 0
    if lm.reads_future:
        check_judge(lm, same_tokens, max(len(each.tokens) for each in samples))
        queries = [Query(each.tokens, roles(each, "g"), roles(each, "a")) for each in samples]
    else:
        texts = [
            list(each.tokens)
            if same_tokens and None not in each.tokens
            else lm.tokenizer(each.text, add_special_tokens=False)["input_ids"]
            for each in samples
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
    """Can this model judge texts of at most so many tokens?

    Raises:
        InputError: It reads the future, but has another tokenizer, or too few positions.
    """
    if lm.reads_future and not same_tokens:
        raise InputError(
            "the judge has another tokenizer than the generations, so it cannot be asked for their tokens: name one "
            "with the same, or a causal one, which reads the text."
        )
    if lm.reads_future and longest > lm.positions - 1:
        raise InputError(
            f"the judge has positions for texts of {lm.positions - 1} tokens, and the generations have {longest}: name "
            "one that has more."
        )


def roles(sample: Generation, role: str) -> list[bool]:
    """Which tokens have this role."""
    return [each == role for each in sample.roles]
