"""`acgpt.json` and the fingerprints of weights and tokenizers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from models import tiny_model, tiny_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from acgpt import Metadata, ModelError
from acgpt.models.metadata import FILE, FORMAT_VERSION, tokenizer_hash, weights_hash

LENGTHS = {"file": "length_head.safetensors", "distance": 16}
FULL = Metadata("ac-gpt", {"distribution": "uniform", "r_max": 0.6}, 0, 2, "base", "tokenizer", LENGTHS)


def test_what_is_written_is_read_again(tmp_path):
    FULL.write(tmp_path)
    assert Metadata.read(tmp_path) == FULL
    assert [file.name for file in tmp_path.iterdir()] == [FILE]  # and no temporary file stays
    assert json.loads((tmp_path / FILE).read_text())["format_version"] == FORMAT_VERSION
    assert (tmp_path / FILE).read_bytes() == (json.dumps(asdict(FULL), indent=2) + "\n").encode()
    Metadata(method="gpt").write(tmp_path)  # over the old one
    assert Metadata.read(tmp_path) == Metadata(method="gpt")


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    FULL.write(tmp_path)
    with pytest.raises(TypeError):
        Metadata(conditioning={"not": {"json", "a set"}}).write(tmp_path)
    assert Metadata.read(tmp_path) == FULL


def test_a_folder_without_metadata_has_none(tmp_path):
    assert Metadata.read(tmp_path) is None
    assert Metadata.read(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        ("[1, 2]", "not acgpt metadata, an object"),
        ("null", "not acgpt metadata, an object"),
        ("{}", "format_version"),
        ('{"format_version": "1", "method": "ac-gpt"}', "format_version"),
        ('{"format_version": 2, "method": "ac-gpt"}', "format version 2.*Upgrade"),
        ('{"format_version": 1}', "no method"),
        ('{"format_version": 1, "method": 7}', "method is 7"),
        ('{"format_version": 1, "method": "ac-gpt", "bos_token_id": "0"}', "bos_token_id is '0'"),
        ('{"format_version": 1, "method": "ac-gpt", "conditioning": [1]}', "conditioning is"),
    ],
)
def test_a_file_that_is_not_right_is_named_with_what_is_wrong(tmp_path, content, problem):
    path = tmp_path / FILE
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=problem) as caught:
        Metadata.read(tmp_path)
    assert str(path) in str(caught.value)


def test_fields_of_later_minor_changes_are_passed_over(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({**asdict(FULL), "trained_on": "a Tuesday"}))
    assert Metadata.read(tmp_path) == FULL


def test_the_config_of_a_model_may_carry_it():
    model = tiny_model()
    assert Metadata.of(model.config) is None
    model.config.acgpt = asdict(FULL)
    assert Metadata.of(model.config) == FULL
    model.config.acgpt = {"format_version": 99}
    with pytest.raises(ModelError, match=r"config of a llama model.*99"):
        Metadata.of(model.config)


# ---- fingerprints --------------------------------------------------------------------------------------------------


def rounded():
    """A model whose weights are exact in bf16."""
    return tiny_model().bfloat16().float()


def test_the_hash_of_weights_is_the_same_in_float32_and_bfloat16():
    assert len(weights_hash(rounded())) == 64
    assert weights_hash(rounded()) == weights_hash(rounded().bfloat16()) == weights_hash(rounded().double())
    assert weights_hash(tiny_model()) == weights_hash(tiny_model().bfloat16())  # also what bf16 has to round


def test_the_hash_of_weights_differs_when_a_weight_does():
    seen = {weights_hash(rounded()), weights_hash(tiny_model(seed=1)), weights_hash(tiny_model(layers=1))}
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"):
        model = rounded()
        weight = model.get_parameter(name)
        with torch.no_grad():
            weight.view(-1)[0] += 1
        seen.add(weights_hash(model))
    model = rounded()
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.v_proj.weight").mul_(1.1)  # all of a tensor
    assert len(seen | {weights_hash(model)}) == 7


def test_the_hash_of_a_tokenizer_is_that_of_what_it_does():
    same = tokenizer_hash(tiny_tokenizer(bos_token="<bos>"))
    assert same == tokenizer_hash(tiny_tokenizer(bos_token="<bos>"))
    more = tiny_tokenizer(bos_token="<bos>")
    more.add_tokens(["another"])
    content = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    content["model"]["merges"] = []  # the same vocabulary, but split in another way
    unmerged = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token="<bos>")
    assert unmerged.get_vocab() == tiny_tokenizer(bos_token="<bos>").get_vocab()
    assert len({same, tokenizer_hash(more), tokenizer_hash(unmerged)}) == 3
