"""One draw: temperature, top-k and top-p by the book, and the ends of the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fuzz import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import truncated
from tolerance import EXACT, exactly

import acgpt.engine.decode
from acgpt.engine.decode import draw
from acgpt.errors import InputError
from acgpt.query.sampling import Sampling


def drawn(logits, uniform, dtype=torch.float64, **how):
    """One draw for each uniform number, all from the same logits."""
    uniform = torch.as_tensor(uniform, dtype=torch.float64)
    rows = torch.tensor([list(logits)], dtype=dtype).expand(len(uniform), -1)
    return draw(rows, uniform, Sampling(**how))


logit = st.floats(-6, 6, allow_nan=False).map(lambda x: round(x, 3))
GRID = (np.arange(1000) + 0.5) / 1000


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(logit, min_size=1, max_size=8),
    st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    st.none() | st.integers(1, 10),
    st.sampled_from([0.05, 0.5, 0.8, 0.95, 1.0]),
)
def test_temperature_top_k_and_top_p_mean_what_the_book_says(logits, temperature, top_k, top_p):
    p = np.exp(np.array(logits) - max(logits))
    p /= p.sum()
    hot = p ** (1 / temperature)
    ranked = np.sort(hot / hot.sum())[::-1][:top_k]
    held = ranked.cumsum() / ranked.sum()
    assume(np.abs(held - top_p).min() > 1e-9 or top_p == 1)  # rounding decides there
    want = truncated(p, Sampling(temperature=temperature, top_p=top_p, top_k=top_k))
    tokens, log_probs = drawn(logits, GRID, temperature=temperature, top_k=top_k, top_p=top_p)
    share = np.bincount(tokens.numpy(), minlength=len(logits)) / len(GRID)
    # Equal logits may be kept in either order: compare what is drawn as probabilities, the largest first.
    assert np.allclose(np.sort(share), np.sort(want), rtol=0, atol=1.01 / len(GRID))
    assert (p[tokens.numpy()] >= np.sort(p[want > 0]).min() * (1 - 1e-12)).all()
    assert np.allclose(log_probs.numpy(), np.log(p[tokens.numpy()]), rtol=0, atol=1e-12)  # the model's own


@pytest.mark.parametrize("how", [{"top_p": 0.95}, {"top_k": 7}, {"top_k": 40, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_left_is_the_same_whether_logits_or_probabilities_are_sorted(dtype, how):
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert dtype == torch.float32 or len(logits[0].unique()) < 300  # there are equals
    logits[:, 7] = float("-inf")
    p = (logits.float() / 0.8).softmax(-1)
    by_logits = acgpt.engine.decode.truncated(p, logits, Sampling(**how))
    by_p = acgpt.engine.decode.truncated(p, p, Sampling(**how))
    for one, other in zip(by_logits, by_p, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("how", "counts"),
    [
        ({"top_k": 2}, [571, 429, 0, 0]),  # 0.4 / 0.7
        ({"top_p": 0.55}, [571, 429, 0, 0]),  # 0.4 is not enough
        ({"top_p": 0.39}, [1000, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.55}, [1000, 0, 0, 0]),  # 0.4 is 0.57 of what top-k has left
        ({"top_k": 2, "top_p": 0.6}, [571, 429, 0, 0]),
        ({"temperature": 0.5, "top_p": 0.5}, [1000, 0, 0, 0]),  # 0.16 / 0.30
        ({"temperature": 0.5, "top_p": 0.6}, [640, 360, 0, 0]),
    ],
    ids=str,
)
def test_truncation_of_a_distribution_one_can_reckon_with(how, counts):
    tokens, _ = drawn(np.log([0.4, 0.3, 0.2, 0.1]), GRID, **how)
    assert np.bincount(tokens.numpy(), minlength=4).tolist() == counts


def test_each_token_takes_a_piece_of_the_unit_interval_as_long_as_its_probability():
    p = np.array([0.1, 0.0, 0.4, 0.3, 0.2])
    with np.errstate(divide="ignore"):
        tokens, _ = drawn(np.log(p), GRID)
    assert np.bincount(tokens.numpy(), minlength=5).tolist() == [100, 0, 400, 300, 200]


def test_greedy_ignores_the_noise():
    tokens, log_probs = drawn([0.0, 2.0, 1.0], [0.0, 0.5, 0.999], temperature=0)
    assert tokens.tolist() == [1, 1, 1]
    want = torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64).log_softmax(0)[1]
    torch.testing.assert_close(log_probs, want.expand(3), **EXACT)


@pytest.mark.parametrize("how", [{}, {"top_k": 4}, {"top_p": 0.9999}, {"top_k": 3, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_impossible_tokens_are_never_drawn_even_at_the_ends_of_the_noise(dtype, how):
    logits = [-torch.inf, 1.0, -torch.inf, 0.5, -200.0, -torch.inf]
    ends = [0.0, np.nextafter(0.0, 1.0), 1e-30, 0.5, 1 - 2**-25, 1 - 2**-26, np.nextafter(1.0, 0.0)]
    tokens, log_probs = drawn(logits, ends, dtype, **how)
    assert set(tokens.tolist()) <= {1, 3}
    assert torch.isfinite(log_probs).all()


@pytest.mark.parametrize("top_k", [None, 1, 3, 8, 12, 100])
@pytest.mark.parametrize("top_p", [0.05, 0.47, 0.95, 0.999999, 1.0])  # no border between equally likely tokens
def test_the_likeliest_few_give_what_a_sort_of_all_gives(top_p, top_k, monkeypatch):
    rng = torch.Generator().manual_seed(5)
    spread = torch.tensor([0.0, 0.5, 2.0, 8.0]).repeat(50)  # from flat to nearly sure
    logits = (torch.randn(200, 64, generator=rng) * spread[:, None]).to(torch.bfloat16)  # with many that are equal
    uniform = torch.rand(200, generator=rng, dtype=torch.float64)
    found, sorts = [], []
    sort = torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda p, *a, **k: sorts.append(p.shape[1]) or sort(p, *a, **k))
    for few in (8, 64):
        monkeypatch.setattr(acgpt.engine.decode, "FEW", few)
        for rows in (1, 200):
            pairs = zip(logits.split(rows), uniform.split(rows), strict=True)
            found.append([draw(*pair, Sampling(temperature=0.8, top_p=top_p, top_k=top_k)) for pair in pairs])
    alone, together, *whole = [[torch.cat(parts) for parts in zip(*each, strict=True)] for each in found]
    for tokens, log_probs in (alone, together, *whole):
        assert torch.equal(tokens, alone[0])
        assert log_probs.tolist() == exactly(alone[1].tolist(), torch.float32)
    assert (8 in sorts) == ((top_p, top_k) != (1.0, None) and (top_k or 0) < 8)  # or nothing would be compared


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_noise_just_under_one_draws_nothing_that_was_cut_off(dtype):
    logits = [0.0, 3.0, 2.0, 1.0, 0.5]
    ends = [1 - 2**-25, 1 - 2**-26, np.nextafter(1.0, 0.0)]
    assert set(drawn(logits, ends, dtype, top_p=0.7)[0].tolist()) <= {1, 2}
    assert set(drawn(logits, ends, dtype, top_k=2)[0].tolist()) <= {1, 2}
    assert drawn(logits, ends, dtype, top_k=1)[0].tolist() == [1, 1, 1]
    assert drawn(logits, ends, dtype, top_p=1e-9)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-45])
def test_a_temperature_near_zero_is_greedy(temperature):
    tokens, log_probs = drawn([0.0, 2.0, 1.9], [0.0, 0.5, 0.999], torch.float32, temperature=temperature)
    assert tokens.tolist() == [1, 1, 1]
    assert torch.isfinite(log_probs).all()


def test_the_log_prob_of_half_precision_logits_is_taken_in_float32():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, log_probs = draw(logits, torch.full((4,), 0.3, dtype=torch.float64), Sampling())
    want = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"first": -1}, "first"),
        ({"first": 0.5}, "first"),
    ],
)
def test_impossible_sampling_is_refused(how, name):
    with pytest.raises(InputError, match=name):
        Sampling(**how)
