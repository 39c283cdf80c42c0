"""From a folder or a file to a `LanguageModel`, and errors that say what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import acgpt
from acgpt import FutureIgnored, InputError, LanguageModel, Metadata, ModelError
from acgpt.display.reader import choose_reader
from acgpt.models.loading import load_base, read_metadata
from acgpt.models.metadata import FILE, tokenizer_hash
from acgpt.models.push import check

pytestmark = pytest.mark.usefixtures("offline")

TEMPLATE = "The {{cat}} sat on the {{mat}}."


def tokenizer():
    return tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")


def network(**how):
    return tiny_model(vocabulary=324, scale=0.15, **how)


def scores(lm, **how):
    return [token.log_prob for token in lm.log_prob(TEMPLATE, **how).tokens]


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder written by `save_pretrained`, and the model that wrote it. Not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "saved"
    lm = LanguageModel(
        network(), tokenizer(), metadata=Metadata(conditioning={"r_max": 0.6}), bos="<eos>", mask="<mask>"
    )
    lm.save_pretrained(folder)
    return folder, lm


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of that folder, to be changed."""
    return Path(shutil.copytree(saved[0], tmp_path / "model"))


def test_only_the_dtype_auto_allows_small_weights(saved):
    folder, _ = saved
    auto, reference = acgpt.load(folder, device="cpu"), acgpt.load(folder, device="cpu", dtype="float32")
    assert auto.engine(None).cpu_steps is auto.engine(None).cpu_steps is not None  # one copy for all engines
    assert reference.engine(None).cpu_steps is None
    assert auto.decoding_weights == reference.decoding_weights == "float32"  # these were not expanded from 4 bits


# ---- folders -------------------------------------------------------------------------------------------------------


def test_a_saved_model_comes_back_with_the_same_answers(saved):
    folder, lm = saved
    again = acgpt.load(folder, device="cpu")
    assert scores(again) == scores(lm)  # to the bit
    assert again.sample(TEMPLATE, n=2, seed=0) == lm.sample(TEMPLATE, n=2, seed=0)
    assert again.metadata == lm.metadata
    assert (again.bos, again.mask, again.reads_future) == (1, 2, True)
    assert str(again.model.device) == "cpu" and again.model.dtype == torch.float32 and not again.model.training
    assert scores(acgpt.load(str(folder))) == scores(lm)  # a path may be a string


def test_a_saved_model_opens_in_transformers(saved):
    folder, lm = saved
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # who may read the rest may read the weights
    model, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config._attn_implementation == "sdpa"  # another program need not know of ours
    text = words("The cat sat on the mat.", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**text).logits, lm.model(**text).logits)


def test_metadata_is_written_beside_the_weights_and_into_the_config(saved):
    folder, _ = saved
    content = json.loads((folder / FILE).read_text())
    assert content == {
        "format_version": 1,
        "method": "ac-gpt",
        "conditioning": {"r_max": 0.6},
        "bos_token_id": 1,
        "mask_token_id": 2,
        "base_hash": None,
        "tokenizer_hash": tokenizer_hash(tokenizer()),
    }
    assert json.loads((folder / "config.json").read_text())["acgpt"] == content


def test_an_ordinary_model_is_saved_with_its_bos_and_still_reads_no_copies(tmp_path):
    lm = LanguageModel(network(), tokenizer(), bos=7)
    lm.save_pretrained(tmp_path)
    again = acgpt.load(tmp_path)
    assert (again.metadata.method, again.bos, again.reads_future) == ("gpt", 7, False)
    with pytest.warns(FutureIgnored):
        assert scores(again) == scores(lm, future=False)


def test_while_a_gguf_file_is_unpacked_progress_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging, "_tqdm_active", True)  # commands of other tests may have switched bars off
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError):
        load_base(tmp_path / "model.gguf", torch.float32)
    assert "Unpacking model.gguf:   0%" in capsys.readouterr().err


def test_metadata_beside_a_gguf_file_is_read(tmp_path):
    Metadata(bos_token_id=3).write(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert read_metadata(tmp_path / "model.gguf") == Metadata(bos_token_id=3)


def test_metadata_of_a_hub_id_is_fetched_from_the_hub(tmp_path, monkeypatch):
    Metadata(bos_token_id=3).write(tmp_path)
    asked = []

    def download(*names, **_):
        asked.append(names)
        return str(tmp_path / names[1])

    monkeypatch.setattr("acgpt.models.checkpoint.cached_file", download)
    assert read_metadata("someone/some-model") == Metadata(bos_token_id=3)
    assert asked == [("someone/some-model", FILE)]


@pytest.mark.parametrize("where", ["file", "config"])
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (None, (True, 5, 6)),  # an adapter that says nothing leaves its base as it is
        (Metadata(method="gpt"), (False, 5, 6)),
        (Metadata(bos_token_id=8, mask_token_id=9), (True, 8, 9)),
    ],
)
def test_what_an_adapter_leaves_open_is_as_its_base_says_wherever_it_says_it(tmp_path, where, own, expected):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    LanguageModel(network(), tokenizer(), metadata=Metadata(), bos=5, mask=6).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    if where == "file":
        del config["acgpt"]
        (base / "config.json").write_text(json.dumps(config))
    else:
        (base / FILE).unlink()
    lora(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(adapter)
    if own is not None:
        own.write(adapter)
    lm = acgpt.load(base, adapter=adapter)
    assert (lm.reads_future, lm.bos, lm.mask) == expected
    reader = choose_reader("{{a}}", str(base), str(adapter))[0]  # what `acgpt show` draws is what is computed
    assert (reader.reads_future, reader.bos, reader.mask) == expected
    acgpt.merge(base, adapter, tmp_path / "merged")
    merged = acgpt.load(tmp_path / "merged")
    assert (merged.reads_future, merged.bos, merged.mask) == expected


def test_bos_and_mask_can_be_named_when_loading(saved):
    lm = acgpt.load(saved[0], bos="<bos>", mask=7)
    assert (lm.bos, lm.mask) == (0, 7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", torch.float64])
def test_a_dtype_can_be_chosen(saved, dtype):
    lm = acgpt.load(saved[0], dtype=dtype)
    assert str(lm.model.dtype).endswith(str(dtype))
    assert scores(lm) == pytest.approx(scores(saved[1]), rel=0, abs=0.1 if dtype == "bfloat16" else 1e-4)


def test_a_lora_model_that_is_saved_comes_back_with_the_same_answers(tmp_path):
    lm = LanguageModel(lora(network()), tokenizer(), metadata=Metadata())
    try:
        lm.save_pretrained(tmp_path / "whole")
    except InputError:
        return  # to refuse is fine; to write a folder that answers something else is not
    assert scores(acgpt.load(tmp_path / "whole")) == pytest.approx(scores(lm), rel=0, abs=1e-4)


# ---- what can be wrong with a folder ---------------------------------------------------------------------------------


def test_the_folder_of_a_run_is_told_where_its_model_is(folder, tmp_path):
    run = tmp_path / "run"
    for checkpoint in ("checkpoint-500", "checkpoint-1000"):
        shutil.copytree(folder, run / "checkpoints" / checkpoint)
    (run / "config.json").write_text('{"recipe": {}}')
    with pytest.raises(ModelError, match=rf"training run.*{run}/checkpoints/checkpoint-1000\."):
        acgpt.load(run)
    shutil.copytree(folder, run / "model")
    for refuse in (lambda: acgpt.load(run), lambda: choose_reader("{{a}}", str(run))[0], lambda: check(run, [])):
        with pytest.raises(ModelError, match=rf"training run.*{run}/model\."):
            refuse()
    shutil.copytree(run / "model", folder / "model")  # a model that has another in its folder is one
    acgpt.load(folder, device="cpu")


def test_another_tokenizer_than_the_one_trained_with_is_refused(folder):
    other = tokenizer()
    other.add_tokens(["another"])
    other.save_pretrained(folder)
    with pytest.raises(ModelError, match="the tokenizer is not the one"):
        acgpt.load(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_device_that_is_not_here_is_refused(saved):
    with pytest.raises(InputError, match="'cuda' is not available"):
        acgpt.load(saved[0], device="cuda")


def test_a_run_that_has_an_adapter_tells_where_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"recipe": {}}')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"its model is {tmp_path / 'adapter'}"):
        acgpt.load(adapter=str(tmp_path))
