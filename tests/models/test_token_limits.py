"""Limits of tokens: a smaller one finds every fill of a larger one that fits it, and none that is worse."""

from __future__ import annotations

import functools
import random
import re
from itertools import combinations
from pathlib import Path

import pytest
import torch
from fuzz import examples
from length_adapters import write_adapters

import acgpt

ROOT = Path(__file__).parents[2]
LIMITS = (3, 4, 5, 6, 8, 12)
NATS = 0.5  # by which a score may be lower


@pytest.fixture(scope="module", params=["lengths", "plain"], ids=["predicted lengths", "searched lengths"])
def tiny(request, tmp_path_factory):
    folders = write_adapters(tmp_path_factory.mktemp("adapters"))
    lm = acgpt.load(folders.base, getattr(folders, request.param))
    for head in lm._executor.heads.values():  # some lengths far likelier than others
        head.bias.data.normal_(0, 2, generator=torch.Generator().manual_seed(0))
    return lm


@pytest.fixture(scope="module")
def default():
    return acgpt.load()


def check(lm, template, monkeypatch):
    """Compare what is found under each limit: the likeliest fill of every length that is tried."""
    monkeypatch.setattr("acgpt.models.fill.TRIES", 0)  # no more than these
    found = {limit: lm.fill(template, n=64, max_tokens=limit, future=True) for limit in LIMITS}
    for smaller, larger in combinations(LIMITS, 2):
        fits = [fill for fill in found[larger] if max(fill.lengths) <= smaller]
        assert {fill.fills for fill in fits} <= {fill.fills for fill in found[smaller]}, (template, smaller, larger)
        if fits:
            assert found[smaller][0].score >= fits[0].score - NATS, (template, smaller, larger)


@pytest.mark.parametrize("seed", range(examples(4)))
def test_a_smaller_limit_finds_what_fits_it(tiny, seed, monkeypatch):
    before, after = random.Random(seed).choices(("a.", "x b", ".y ", "ab"), k=2)
    check(tiny, before + ".{{_}}." + after, monkeypatch)


@functools.cache
def excerpts(folder, pattern):
    """Return all pieces of three lines of the files in a folder of the repository that have enough words."""
    texts = [path.read_text(encoding="utf-8").splitlines() for path in sorted((ROOT / folder).rglob(pattern))]
    pieces = ["\n".join(lines[i : i + 3]) for lines in texts for i in range(len(lines) - 2)]
    return [piece for piece in pieces if len(re.findall(r"\w+", piece)) > 8]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(examples(20)))  # prose and code in turns; ACGPT_TEST_FUZZ=10 for 200
def test_the_embedded_default_finds_under_a_smaller_limit_what_fits_it(default, seed, monkeypatch):
    rng = random.Random(seed)
    text = rng.choice(excerpts("src", "*.py") if seed % 2 else excerpts("docs", "*.md"))
    words = [word.span() for word in re.finditer(r"\w+", text)]
    first = rng.randrange(len(words) - 3)
    start, end = words[first][0], words[first + rng.choice([0, 0, 0, 1, 2, 3])][1]  # one to four words
    check(default, acgpt.escape(text[:start], before_slot=True) + "{{_}}" + acgpt.escape(text[end:]), monkeypatch)
