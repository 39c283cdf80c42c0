"""The check that no test compares bits across batches can itself fail, and leaves bits that are promised alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rounding import perturbed
from tolerance import exactly
from toys import answer, query, toy

QUESTIONS = [query(roles) for roles in ("gaag", "agag", "aaga")]


@pytest.fixture
def network():
    return toy("ac-gpt")


def test_other_batches_give_other_bits_and_the_same_numbers(network):
    with perturbed():
        together, alone = answer("ac-gpt", network, QUESTIONS), [answer("ac-gpt", network, [q])[0] for q in QUESTIONS]
    assert together != alone
    assert [x for scores in together for x in scores] == exactly([x for scores in alone for x in scores])


def test_the_same_batches_give_the_same_bits(network):
    with perturbed():
        assert answer("ac-gpt", network, QUESTIONS) == answer("ac-gpt", network, QUESTIONS)


def test_ties_and_zeros_of_a_distribution_stay():
    logits = torch.tensor([[0.5, -torch.inf, 0.5, 2.0], [1.0, 1.0, -torch.inf, -torch.inf]])
    with perturbed():
        p = logits.softmax(-1)
    assert p[0, 0] == p[0, 2] and p[1, 0] == p[1, 1] and (p[logits.isinf()] == 0).all()
    assert not torch.equal(p, logits.softmax(-1))


def test_afterwards_all_is_as_it_was():
    before = F.linear, F.scaled_dot_product_attention, torch.addmm, torch.Tensor.softmax
    with perturbed():
        assert F.linear is not before[0]
    assert before == (F.linear, F.scaled_dot_product_attention, torch.addmm, torch.Tensor.softmax)
