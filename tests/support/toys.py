"""Networks small enough to enumerate all their outputs, for the methods that the paper compares."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from scipy import stats

from acgpt.common.options import ignore
from acgpt.engine.architecture import check_model
from acgpt.engine.engine import Engine
from acgpt.methods import method_of
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN, generator
from acgpt.query.query import Query
from acgpt.training.batches import Batch
from acgpt.training.learner import Learner, new_model
from acgpt.training.recipe import Shape

BOS = 0


def toy(name, *, vocabulary=4, length=6, scale=0.4, dtype=torch.float64, seed=0, **own):
    """Return a network of a method, with weights so large that every token matters; its last id is MASK.

    `own` are keys that only the config of the method's network has.
    """
    method = method_of(name)
    model = new_model(
        Shape(2, 32, 4), vocabulary=vocabulary + method.needs_mask, positions=length + method.overhead,
        network=method.network, **own,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data.normal_(0, scale if weight.ndim == 2 else 0.1, generator=rng)
    model.to(dtype).eval()
    check_model(model)
    return model


def mask_of(model, name):
    return model.config.vocab_size - 1 if method_of(name).needs_mask else None


def answer(method, model, queries, *, budget=10**6, **how):
    method = method_of(method) if isinstance(method, str) else method
    with torch.inference_mode():
        return method.log_probs(engine_of(model, method.name, budget=budget), queries, **how)


def engine_of(model, name, *, budget=2**13, notice=ignore):
    return Engine(model, bos=BOS, mask=mask_of(model, name), backend="dense", budget=budget, notice=notice)


def learner_of(model, name):
    return Learner(model, backend="dense", compiled=False, forbidden_token=mask_of(model, name))


def all_fillings(query, vocabulary):
    """Return the query with every possible choice of asked tokens."""
    for choice in itertools.product(range(vocabulary), repeat=len(query.asked_positions)):
        tokens = list(query.tokens)
        for position, token in zip(query.asked_positions, choice, strict=True):
            tokens[position - 1] = token
        yield Query(tokens, query.given, query.asked)


def conditional(joint, query):
    """Return log p(asked | given) for any roles, by sums over the probabilities of all texts."""

    def mass(known):
        return sum(p for text, p in joint.items() if all(text[at] == query.tokens[at] for at in known))

    given = [at for at in range(len(query)) if query.given[at]]
    asked = [at for at in range(len(query)) if query.asked[at]]
    return math.log(mass(given + asked) / mass(given))


def total_probability(method, model, query, vocabulary):
    """Return the total probability of all choices of asked tokens, which is 1 for a distribution."""
    return sum(math.exp(sum(scores)) for scores in answer(method, model, list(all_fillings(query, vocabulary))))


def query(roles, tokens=None):
    """Return the query of a word such as "gaua": given, asked, unknown, asked."""
    tokens = [(2 * position + 1) % 3 for position in range(len(roles))] if tokens is None else tokens
    return Query(tokens, [role == "g" for role in roles], [role == "a" for role in roles])


def roles_of(words):
    """Return the roles of words such as "gaua", one array of all of them."""
    return np.array([[{"g": GIVEN, "a": ASKED, "u": UNKNOWN}[role] for role in word] for word in words], dtype=np.int8)


def batch_of(method, words, *, mask=None, vocabulary=4, tokens=None, seed=0, budget=None):
    """Return a training batch of texts with these roles: its tokens, its layout and itself."""
    roles = roles_of(words)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, roles.shape) if tokens is None else tokens
    rngs = [generator(seed, 0, item) for item in range(len(words))]
    slots = method.lay_out(tokens, roles, rngs, bos=BOS, mask=mask)
    return tokens, slots, Batch.of(slots, longest=method.longest(roles.shape[1]), bos=BOS, budget=budget)


def every_query(length, roles="ga"):
    """Return a query for every choice of roles with at least one asked token."""
    for word in itertools.product(roles, repeat=length):
        if "a" in word:
            yield query("".join(word))


def p_value(counts, probabilities):
    """Return the p-value of a chi-square test; outcomes expected fewer than five times are pooled."""
    counts, wanted = np.array(counts, dtype=float), np.array(probabilities) * sum(counts)
    rare = wanted < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
    return stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue


def counted(samples, vocabulary):
    """Count the samples of each filling, in the order of `all_fillings`."""
    size = len(samples[0][0])
    numbers = [int(np.dot(tokens, vocabulary ** np.arange(size)[::-1])) for tokens, _ in samples]
    return np.bincount(numbers, minlength=vocabulary**size)
