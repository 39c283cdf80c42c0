"""Arguments that must be numbers refuse other values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import tiny_model, tiny_tokenizer

import acgpt
from acgpt import InputError, LanguageModel, Metadata, Query, QueryError


@pytest.fixture(scope="module")
def parts():
    return tiny_model(vocabulary=340), tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")


@pytest.fixture(scope="module")
def lm(parts):
    return LanguageModel(*parts, metadata=Metadata())


@pytest.mark.parametrize("name", ["n", "temperature", "top_p", "top_k", "seed"])
@pytest.mark.parametrize("value", [True, False, np.True_], ids=repr)
def test_booleans_are_no_numbers_for_sampling(lm, name, value):
    with pytest.raises(InputError, match=rf"^{name} must be a (whole )?number, "):
        lm.sample("The {{_1}} sat.", **{name: value})


def test_integers_of_other_libraries_are_numbers(lm):
    want = [sample.text for sample in lm.sample("The {{_2}} sat.", 2, top_k=5, seed=3)]
    numbers = {"n": np.int64(2), "top_k": torch.tensor(5), "seed": np.int32(3)}
    assert [sample.text for sample in lm.sample("The {{_2}} sat.", **numbers)] == want


@pytest.mark.parametrize("name", ["bos", "mask"])
@pytest.mark.parametrize("value", [True, False, 1.5, np.True_], ids=repr)
def test_a_token_is_named_by_its_id_or_its_text(parts, name, value):
    with pytest.raises(InputError, match=rf"^{name} must be the id of a token or its text, not "):
        LanguageModel(*parts, **{name: value})


@pytest.mark.parametrize("name", ["model", "device", "dtype", "adapter"])
@pytest.mark.parametrize("value", [True, 7], ids=repr)
def test_what_is_to_be_loaded_is_not_named_by_a_number(name, value):
    with pytest.raises(InputError, match=str(value)):
        acgpt.load(**({"model": "/no/such/folder"} | {name: value}))


@pytest.mark.parametrize(
    "tokens", [[5, True], (False, 7), torch.tensor([True, False]), np.array([True, False])], ids=repr
)
def test_booleans_are_no_token_ids(tokens):
    with pytest.raises(QueryError, match="token ids, whole numbers, or None"):
        Query(tokens, given=[True, False])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_token_ids_may_be_integers_of_any_library(kind):
    query = Query(kind([5, 7]), given=[True, False])
    assert query == Query([5, 7], given=[True, False]) and {*map(type, query.tokens)} == {int}
