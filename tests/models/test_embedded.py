"""The embedded model is checked once, read quickly afterwards, and checked again when anything has changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIG, TOKENIZER, WEIGHTS, both, cut, last_is_nan, raw, tensors, text, without
from safetensors.torch import load_file, save_file
from test_loading import network, scores, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import acgpt
from acgpt import LanguageModel, ModelError
from acgpt.models import embedded as copies
from acgpt.models import language_model, loading
from acgpt.models.embedded import record_of, write_record
from acgpt.models.metadata import tokenizer_hash

pytestmark = pytest.mark.usefixtures("offline")

CPU = torch.device("cpu")
TEXTS = ("The cat sat.", " naïve “café”\n\tdef f(x):\r\n  🙂 日本語", "<eos><mask> <|im_start|>", "")


@pytest.fixture
def checks(monkeypatch):
    """The names of the checks that have run, in order."""
    ran = []

    def recorded(module, name):
        check = getattr(module, name)
        return lambda *arguments: (ran.append(name), check(*arguments))[1]

    for module, names in {
        loading: ("check_finite", "load_base"),
        language_model: ("check_model", "tokenizer_hash"),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, recorded(module, name))
    return ran


@pytest.fixture
def checked(checks):
    """A function that loads a model and returns the names of the checks that ran."""

    def checked(*arguments, **options):
        checks.clear()
        acgpt.load(*arguments, **options)
        return set(checks)

    return checked


def converted(cache):
    (folder,) = cache.iterdir()
    return folder


def saved_files(thing, folder):
    thing.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same_tokenizers(ours, reference, tmp_path):
    assert type(ours) is type(reference)
    assert ours.get_vocab() == reference.get_vocab() and ours.special_tokens_map == reference.special_tokens_map
    for sentence in TEXTS:
        ids = reference(sentence)["input_ids"]
        assert ours(sentence)["input_ids"] == ids and ours.decode(ids) == reference.decode(ids)
    files, expected = saved_files(ours, tmp_path / "ours"), saved_files(reference, tmp_path / "reference")
    settings, want = (json.loads(content.pop("tokenizer_config.json")) for content in (files, expected))
    arguments = dict.fromkeys(("is_local", "local_files_only"))  # of the call that read them
    assert files == expected and settings | arguments == want | arguments


# ---- what is left out ------------------------------------------------------------------------------------------------


def test_the_checks_run_once_and_the_answers_stay_the_same(embedded, adapted, checks, monkeypatch):
    monkeypatch.setattr(loading, "DEFAULT_ADAPTER", adapted[1])
    first = acgpt.load()
    assert {"check_finite", "check_model", "tokenizer_hash", "load_base"} <= set(checks)
    checks.clear()
    second = acgpt.load()
    assert checks == []
    for future in (False, True):
        assert scores(second, future=future) == scores(first, future=future)  # to the bit
    assert second.sample("a {{_3}} b", n=2, seed=0) == first.sample("a {{_3}} b", n=2, seed=0)
    assert second.model.config._attn_implementation == first.model.config._attn_implementation == "acgpt"
    assert not second.model.training and second.bos == first.bos
    ours, reference = (dict(lm.model.state_dict()) for lm in (second, first))
    assert ours.keys() == reference.keys()
    for name, weight in ours.items():
        assert weight.dtype == reference[name].dtype and torch.equal(weight, reference[name])
    for one, other in zip(second.model.named_parameters(), first.model.named_parameters(), strict=True):
        assert (one[0], one[1].requires_grad) == (other[0], other[1].requires_grad)


def test_a_model_and_a_model_with_its_adapter_are_checked_separately(embedded, adapted, checked, monkeypatch):
    monkeypatch.setattr(loading, "DEFAULT_ADAPTER", adapted[1])
    assert "check_model" in checked(adapter=False)
    assert "check_model" in checked()
    assert checked(adapter=False) == checked() == set()


def test_what_the_user_brings_and_another_precision_are_always_checked(embedded, adapted, checked):
    for _ in range(2):
        assert {"check_finite", "check_model", "tokenizer_hash"} <= checked(adapter=adapted[1])
        for arguments in ((adapted[0],), (adapted[1],)):
            assert {"check_finite", "check_model"} <= checked(*arguments)
        assert {"check_finite", "check_model"} <= checked(adapter=False, dtype="bfloat16")


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_the_copy_is_read_as_transformers_reads_it(embedded, tmp_path):
    folder = loading.embedded_default()
    ours, words = copies.read(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for kind in ("named_parameters", "named_buffers"):
        pairs = list(zip(getattr(ours, kind)(), getattr(reference, kind)(), strict=True))
        assert all(a == b and torch.equal(x, y) and x.dtype == y.dtype for (a, x), (b, y) in pairs)
    assert not ours.training and all(weight.requires_grad for weight in ours.parameters())
    assert ours.config.to_dict() == reference.config.to_dict() and ours.name_or_path == reference.name_or_path
    assert ours.generation_config.to_dict() == reference.generation_config.to_dict()
    assert saved_files(ours, tmp_path / "a") == saved_files(reference, tmp_path / "b")
    same_tokenizers(words, AutoTokenizer.from_pretrained(folder), tmp_path)


def test_a_change_of_the_weights_in_memory_leaves_the_file_alone(embedded):
    folder = loading.embedded_default()
    before = load_file(folder / "model.safetensors")
    ours, _ = copies.read(folder)
    with torch.no_grad():
        for weight in ours.parameters():
            weight.fill_(7.0)
    after = load_file(folder / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_the_real_tokenizer_equals_the_one_in_the_gguf_file(tmp_path):
    folder = loading.embedded_default()
    (gguf,) = Path(next(iter(find_spec(loading.DEFAULT_PACKAGE).submodule_search_locations))).glob("*.gguf")
    ours = copies.read_tokenizer(folder)
    assert tokenizer_hash(ours) == tokenizer_hash(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))
    same_tokenizers(ours, AutoTokenizer.from_pretrained(folder), tmp_path)


# ---- what has changed ------------------------------------------------------------------------------------------------


def test_the_checks_run_again_after_any_change(embedded, adapted, checked, monkeypatch, tmp_path):
    _, cache, _ = embedded
    adapter = Path(shutil.copytree(adapted[1], tmp_path / "own"))
    monkeypatch.setattr(loading, "DEFAULT_ADAPTER", adapter)
    version = copies.installed

    def rewrite(path):
        status = path.stat()
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # also if the new file has the old time

    acgpt.load()
    changes = {
        "weights": lambda: rewrite(converted(cache) / "model.safetensors"),
        "tokenizer": lambda: rewrite(converted(cache) / "tokenizer.json"),
        "adapter": lambda: rewrite(adapter / "adapter_model.safetensors"),
        "torch": lambda: monkeypatch.setattr(copies, "installed", lambda name: name + str(version(name))),
        "processor": lambda: monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another"),
        "machine": lambda: monkeypatch.setattr("platform.node", lambda: "another"),
        "code": lambda: monkeypatch.setattr(copies, "CODE", ("models",)),
    }
    for name, change in changes.items():
        change()
        assert {"check_model", "check_finite"} <= checked(), name
        assert checked() == set(), name


def test_the_last_records_are_kept(tmp_path):
    paths = [tmp_path / "checked" / str(number) for number in range(copies.KEPT + 2)]
    for number, path in enumerate(paths):
        write_record(path)
        os.utime(path, (number, number))
    write_record(paths[-1])
    assert sorted(paths[0].parent.iterdir()) == sorted(paths[2:])


@pytest.mark.skipif(os.name != "posix" or os.getuid() == 0, reason="root may write everywhere")
def test_a_copy_that_cannot_be_written_is_checked_every_time(embedded, checked):
    folder = loading.embedded_default()
    folder.chmod(0o555)
    try:
        for _ in range(2):
            assert "check_model" in checked(adapter=False)
    finally:
        folder.chmod(0o755)


def test_a_config_that_asks_for_code_is_refused_whatever_the_record_says(embedded):
    acgpt.load(adapter=False)
    folder = converted(embedded[1])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "someone/kernel"}))
    with pytest.raises(ModelError, match="kernel"):
        copies.read(folder)


# ---- damage ----------------------------------------------------------------------------------------------------------


def drop_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop(sorted(weights)[-1])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGE = {
    "weights that are broken": raw(WEIGHTS, b"broken"),
    "a weight that is missing": drop_weights,
    "a tokenizer that is empty": text(TOKENIZER, "{}"),
    "weights that are cut off": cut(WEIGHTS, 1000),
    "weights of NaN": tensors(last_is_nan),
    "no tokenizer": both(without(TOKENIZER), without("tokenizer_config.json")),
    "a config that is a list": text(CONFIG, "[]"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_copy_is_converted_again(embedded, damage):
    gguf, cache, reads = embedded
    want = scores(acgpt.load(adapter=False), future=False)
    damage(converted(cache))
    for _ in range(3):
        assert scores(acgpt.load(adapter=False), future=False) == want
    assert reads == [gguf] * 2
    assert converted(cache).name.startswith("tiny-")  # nothing is left of the damaged one


@pytest.mark.parametrize("damage", [*DAMAGE.values()][:3], ids=[*DAMAGE][:3])
def test_damage_is_noticed_even_if_the_record_hides_it(embedded, damage):
    want = scores(acgpt.load(adapter=False), future=False)
    folder = converted(embedded[1])
    damage(folder)
    write_record(record_of(folder, None, CPU, torch.float32))
    assert scores(acgpt.load(adapter=False), future=False) == want


def test_a_copy_that_another_process_has_replaced_is_kept(embedded):
    folder = loading.embedded_default()
    seen = folder.stat().st_ino
    kept = folder.with_name("kept")
    folder.rename(kept)
    shutil.copytree(kept, folder)  # the other process
    loading.discard(folder, seen)
    assert (folder / "model.safetensors").is_file()
    loading.discard(folder, folder.stat().st_ino)
    assert not folder.exists() and [path.name for path in embedded[1].iterdir()] == ["kept"]


# ---- several processes -----------------------------------------------------------------------------------------------


def load_in_process(results, number):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    results.put((number, [scores(acgpt.load(adapter=False), future=False) for _ in range(2)]))


@pytest.mark.skipif(os.name != "posix", reason="forks")
def test_two_processes_at_once_load_the_same_model(embedded):
    want = scores(LanguageModel(network(), tokenizer(), bos="<mask>"), future=False)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=load_in_process, args=(results, number)) for number in range(2)]
    for process in processes:
        process.start()
    answers = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert answers == {0: [want, want], 1: [want, want]}
    folder = converted(embedded[1])
    assert record_of(folder, None, CPU, torch.float32).exists()
