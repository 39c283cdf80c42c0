"""A checkpoint that is damaged, or made to do harm, is refused in one line, before anything is built of it."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from checkpoints import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    DEEP,
    TOKENIZER,
    WEIGHTS,
    both,
    cut,
    evil_pickle,
    header,
    index,
    instead,
    keys,
    last_is_nan,
    raw,
    tensors,
    text,
    tokens,
    without,
)
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from typer.testing import CliRunner

import acgpt
from acgpt import ModelError
from acgpt.cli.main import app
from acgpt.models.checkpoint import check_size

pytestmark = pytest.mark.usefixtures("offline")

NAN, INFINITY = float("nan"), float("inf")
NO_OBJECT, NO_CODE, DAMAGED = "is not a JSON object", "acgpt runs no code", "is damaged or cut off"
NOT_BUILT = {  # nothing is built of these: what is wrong, and what is said of it
    "pickle of torch": (evil_pickle("pytorch_model.bin", WEIGHTS, "torch"), NO_CODE),
    "pickle": (evil_pickle("pytorch_model.bin", WEIGHTS, "pickle"), NO_CODE),
    "pickle that is empty": (both(without(WEIGHTS), raw("pytorch_model.bin", b"")), DAMAGED),
    "pickle in an index": (
        both(index({"weight_map": {"a": "part.bin"}}), evil_pickle("part.bin", "part.safetensors", "torch")),
        NO_CODE,
    ),
    "width of 10**9": (keys(hidden_size=10**9), r"\(324, 1000000000\), and has \(324, 32\)"),
    "width of 10**30": (keys(hidden_size=10**30), "no model can be built from its config"),
    "width that is text": (keys(hidden_size="x"), "hidden_size"),
    "width below zero": (keys(hidden_size=-32), "hidden_size=-32, which must be 1 or more"),
    "no heads": (keys(num_attention_heads=0), "num_attention_heads=0, which must be 1 or more"),
    "no heads of keys": (keys(num_key_value_heads=0), "no model can be built from its config .*zero"),
    "heads that do not divide": (keys(num_attention_heads=10**9), "1000000000"),
    "vocabulary of 10**12": (keys(vocab_size=10**12), r"64,000,000,018,592 parameters.*hold at most 39,328"),
    "vocabulary of 4 * 10**7": (keys(vocab_size=4 * 10**7), r"2,560,018,592 parameters"),
    "10**7 layers": (keys(num_hidden_layers=10**7), "10000000, and its files hold 21 tensors"),
    "no layers": (keys(num_hidden_layers=0), "num_hidden_layers=0"),
    "10**9 experts": (keys(num_local_experts=10**9), "num_local_experts=1000000000; at most 10,000"),
    "positions below zero": (keys(max_position_embeddings=-5), "max_position_embeddings=-5"),
    "rope of text": (keys(rope_parameters={"rope_type": "default", "rope_theta": "x"}), "config"),
    "unknown activation": (keys(hidden_act="evil"), "no model can be built.*'evil'"),
    "dtype that is none": (keys(dtype="garbage"), "'garbage'"),
    "quantisation of nothing": (keys(quantization_config=5), "config.json"),
    "layer types of nothing": (keys(layer_types=5), "config.json"),
    "config that hides a method": (keys(get_text_config=5), "cannot load"),
    "config that is a list": (text(CONFIG, "[]"), f"config.json {NO_OBJECT}"),
    "config that is deep": (text(CONFIG, DEEP), "nested too deeply"),
    "config that is empty": (text(CONFIG, ""), f"config.json {NO_OBJECT}"),
    "config that is not text": (raw(CONFIG, b"\xff"), f"config.json {NO_OBJECT}"),
    "config of long digits": (text(CONFIG, f'{{"hidden_size": {"9" * 5000}}}'), f"config.json {NO_OBJECT}"),
    "config without a type": (text(CONFIG, "{}"), "model_type"),
    "config of an unknown type": (keys(model_type="abacus"), "abacus"),
    "config of a number's type": (keys(model_type=5), "model type `5`"),
    "config that is a folder": (instead(CONFIG, Path.mkdir), r"has no config\.json"),
    "config in a loop of links": (instead(CONFIG, lambda path: path.symlink_to(path.name)), r"has no config\.json"),
    "nothing": (lambda folder: [path.unlink() for path in folder.iterdir()], r"has no config\.json"),
    "weights outside": (keys(transformers_weights="../x.safetensors"), r"names \.\./x\.safetensors, which is not a"),
    "weights cut in the header": (cut(WEIGHTS, 1000), f"{WEIGHTS} {DAMAGED}"),
    "weights cut in the tensors": (cut(WEIGHTS, 30_000), f"{WEIGHTS} {DAMAGED}"),
    "weights that are empty": (raw(WEIGHTS, b""), f"{WEIGHTS} {DAMAGED}"),
    "header of 2**63 bytes": (header(2**63), f"{WEIGHTS} {DAMAGED}"),
    "header without tensors": (header(8), f"{WEIGHTS} {DAMAGED}"),
    "index that leads out": (index({"weight_map": {"a": "../../x.safetensors"}}), "not a file of the checkpoint"),
    "index of a whole path": (index({"weight_map": {"a": "/x.safetensors"}}), "not a file of the checkpoint"),
    "index of what is not there": (
        index({"weight_map": {"a": "gone.safetensors"}}),
        "gone.safetensors, which is missing",
    ),
    "index of a number": (index({"weight_map": {"a": 5}}), "names 5"),
    "index without a map": (index({}), "no weight_map"),
    "index that is a list": (index("[]"), NO_OBJECT),
    "index that is deep": (index(DEEP), NO_OBJECT),
    "tokenizer that is broken": (text(TOKENIZER, "{"), "its tokenizer"),
    "tokenizer that is empty": (text(TOKENIZER, ""), "its tokenizer"),
    "tokenizer that is deep": (text(TOKENIZER, DEEP), "its tokenizer"),
    "tokenizer that is a list": (text(TOKENIZER, "[]"), "its tokenizer"),
    "tokenizer that is missing": (without(TOKENIZER), "its tokenizer"),
    "tokenizer without words": (tokens(lambda content: content["model"].update(vocab={})), "its tokenizer"),
    "tokenizer with a word below zero": (tokens(lambda content: content["model"]["vocab"].update(z=-1)), "u32"),
    "tokenizer_config that is a list": (text("tokenizer_config.json", "[]"), NO_OBJECT),
    "tokenizer_config that is deep": (text("tokenizer_config.json", DEEP), NO_OBJECT),
    "tokenizer class that is a number": (keys("tokenizer_config.json", tokenizer_class=5), "its tokenizer"),
    "generation_config that is deep": (text("generation_config.json", DEEP), NO_OBJECT),
}
BUILT = {  # what only shows in the model
    "weights that are missing": (without(WEIGHTS), "no file named model.safetensors"),
    "weights that are a folder": (instead(WEIGHTS, Path.mkdir), "no file named model.safetensors"),
    "tensors of wrong shapes": (tensors(torch.t), r"has shape \(32, 324\) in its file, and \(324, 32\) by its"),
    "one layer more": (keys(num_hidden_layers=3), r"lacks the weights .*layers\.2\.self_attn\.q_proj"),
    "NaN": (tensors(lambda tensor: tensor * NAN), "embed_tokens.weight are not all finite numbers"),
    "infinities": (tensors(lambda tensor: tensor + INFINITY), "embed_tokens.weight are not all finite numbers"),
    "one NaN a tensor": (tensors(last_is_nan), "embed_tokens.weight are not all finite numbers"),
    "rope of NaN": (keys(rope_parameters={"rope_type": "default", "rope_theta": NAN}), "inv_freq are not all finite"),
    "norms of NaN": (keys(rms_norm_eps=NAN), "its logits are not numbers"),
    "acgpt.json that is deep": (text("acgpt.json", DEEP), "acgpt.json is not valid JSON"),
    "acgpt.json that is a list": (text("acgpt.json", "[]"), "acgpt.json is not acgpt metadata"),
    "BOS of 10**12": (keys("acgpt.json", bos_token_id=10**12), "bos token 1000000000000 is not one of"),
}
WANTS = r"\(1000000000, 32\), and has \(8, 32\)"
ADAPTERS = {
    "config that is a list": (text(ADAPTER_CONFIG, "[]"), f"{ADAPTER_CONFIG} {NO_OBJECT}"),
    "config that is deep": (text(ADAPTER_CONFIG, DEEP), f"{ADAPTER_CONFIG} {NO_OBJECT}"),
    "config that is empty": (text(ADAPTER_CONFIG, ""), f"{ADAPTER_CONFIG} {NO_OBJECT}"),
    "config without a type": (text(ADAPTER_CONFIG, "{}"), "peft_type"),
    "unknown type": (keys(ADAPTER_CONFIG, peft_type="EVIL"), "EVIL"),
    "type that is a number": (keys(ADAPTER_CONFIG, peft_type=5), "cannot put the adapter"),
    "rank of 10**9": (keys(ADAPTER_CONFIG, r=10**9), WANTS),
    "rank of 10**9 in one layer": (keys(ADAPTER_CONFIG, rank_pattern={"q_proj": 10**9}), WANTS),
    "rank of 10**30": (keys(ADAPTER_CONFIG, r=10**30), "cannot put the adapter"),
    "rank that is text": (keys(ADAPTER_CONFIG, r="x"), "cannot put the adapter"),
    "rank below zero": (keys(ADAPTER_CONFIG, r=-1), "cannot put the adapter.*-1"),
    "another rank": (keys(ADAPTER_CONFIG, r=3), r"\(3, 32\), and has \(8, 32\)"),
    "layers that are not there": (keys(ADAPTER_CONFIG, target_modules=["evil"]), "cannot put the adapter.*evil"),
    "more layers": (keys(ADAPTER_CONFIG, target_modules=["q_proj", "k_proj", "v_proj"]), "lacks weights for .*k_proj"),
    "scale of NaN": (keys(ADAPTER_CONFIG, lora_alpha=NAN), "its logits are not numbers"),
    "10**12 virtual tokens": (
        keys(ADAPTER_CONFIG, peft_type="PROMPT_TUNING", num_virtual_tokens=10**12),
        "adds virtual tokens",
    ),
    "other adapters": (keys(ADAPTER_CONFIG, peft_type="XLORA", adapters={"0": "x"}), "which loads other adapters"),
    "weights that are missing": (without(ADAPTER_WEIGHTS), f"has no {ADAPTER_WEIGHTS}"),
    "weights that are cut off": (cut(ADAPTER_WEIGHTS, 100), f"{ADAPTER_WEIGHTS} {DAMAGED}"),
    "tensors of wrong shapes": (tensors(torch.t, ADAPTER_WEIGHTS), r"\(8, 32\), and has \(32, 8\)"),
    "NaN": (tensors(lambda tensor: tensor * NAN, ADAPTER_WEIGHTS), r"lora_A\.default\.weight are not all finite"),
    "pickle of torch": (evil_pickle("adapter_model.bin", ADAPTER_WEIGHTS, "torch"), NO_CODE),
    "pickle": (evil_pickle("adapter_model.bin", ADAPTER_WEIGHTS, "pickle"), NO_CODE),
}


@pytest.fixture
def model(workshop, tmp_path):
    return Path(shutil.copytree(workshop / "model", tmp_path / "model"))


@pytest.fixture
def adapter(workshop, tmp_path):
    return Path(shutil.copytree(workshop / "adapter", tmp_path / "adapter"))


def refusal(*names, match, folder):
    """Return the error of `acgpt.load`; check that it is one short line and that no code was run."""
    with pytest.raises(ModelError, match=match) as caught:
        acgpt.load(*names)
    message = str(caught.value).replace(str(folder), "FOLDER")
    assert "\n" not in message and len(message) < 600
    assert "trust_remote_code" not in message and "weights_only" not in message  # advice to run it after all
    assert not (folder / "marker").exists()
    return message


@pytest.mark.parametrize(("damage", "match"), NOT_BUILT.values(), ids=NOT_BUILT)
def test_a_damaged_model_is_refused_before_it_is_built(model, monkeypatch, damage, match):
    damage(model)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was built"))
    refusal(model, match=match, folder=model)


@pytest.mark.parametrize(("damage", "match"), BUILT.values(), ids=BUILT)
def test_a_model_that_turns_out_to_be_damaged_is_refused(model, damage, match):
    damage(model)
    refusal(model, match=match, folder=model)


@pytest.mark.parametrize(("damage", "match"), ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_damaged_adapter_is_refused(workshop, adapter, damage, match):
    damage(adapter)
    refusal(workshop / "model", adapter, match=match, folder=adapter)


@pytest.mark.parametrize("name", ["config that is deep", "config that is a list", "rank of 10**9", "pickle"])
def test_a_damaged_adapter_that_brings_its_base_is_refused(adapter, name):
    damage, match = ADAPTERS[name]
    damage(adapter)
    refusal(adapter, match=match, folder=adapter)


def test_pickles_of_tensors_alone_are_read(workshop, model, adapter):
    want = acgpt.load(workshop / "model", workshop / "adapter").log_prob("The {{cat}} sat.").log_prob
    for file, pickle in ((model / WEIGHTS, "pytorch_model.bin"), (adapter / ADAPTER_WEIGHTS, "adapter_model.bin")):
        torch.save(safetensors_of(file), file.with_name(pickle))
        file.unlink()
    assert acgpt.load(model, adapter).log_prob("The {{cat}} sat.").log_prob == pytest.approx(want, abs=1e-6)


def test_weights_in_several_files_are_read(workshop, model):
    from safetensors.torch import save_file

    weights = safetensors_of(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    names = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in set(names.values()):
        save_file({name: weights[name] for name in weights if names[name] == file}, model / file, {"format": "pt"})
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    want = acgpt.load(workshop / "model").log_prob("The {{cat}} sat.")
    assert acgpt.load(model).log_prob("The {{cat}} sat.") == want


def safetensors_of(path):
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize("attention", ["flash_attention_2", "eager", "no-such-attention", None])
def test_an_attention_that_the_config_names_does_not_matter(workshop, model, attention):
    keys(attn_implementation=attention)(model)
    want = acgpt.load(workshop / "model").log_prob("The {{cat}} sat.").log_prob
    assert acgpt.load(model).log_prob("The {{cat}} sat.").log_prob == pytest.approx(want, abs=1e-5)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="everything can be read here")
@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, TOKENIZER, "acgpt.json"])
def test_a_file_that_may_not_be_read_is_named(model, file):
    (model / file).chmod(0)
    refusal(model, match=file.partition(".")[0], folder=model)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_a_gguf_file_that_says_more_than_it_can_hold_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1000))
    small = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1}
    check_size("it", LlamaConfig(**small, vocab_size=900), [file])  # 7,324 parameters, a bit or more for each
    with pytest.raises(ModelError, match=r"describes 8,124 parameters, and its files hold at most 8,000"):
        check_size("it", LlamaConfig(**small, vocab_size=1000), [file])
    with pytest.raises(ModelError, match="num_hidden_layers=1001"):
        check_size("it", LlamaConfig(**small | {"num_hidden_layers": 1001}), [file])


def test_tables_that_a_config_blows_up_are_refused(tmp_path):
    from transformers import GPTJConfig, GPTJForCausalLM

    shape = {"n_embd": 8, "n_layer": 1, "n_head": 1, "rotary_dim": 8, "vocab_size": 10, "n_inner": 8}
    GPTJForCausalLM(GPTJConfig(**shape, n_positions=16)).save_pretrained(tmp_path)
    check_size("it", GPTJConfig(**shape, n_positions=16), [tmp_path / WEIGHTS])
    with pytest.raises(ModelError, match=r"tables of .* numbers"):
        check_size("it", GPTJConfig(**shape, n_positions=10**9), [tmp_path / WEIGHTS])


def test_tied_weights_are_counted_once(tmp_path):
    from transformers import GPT2LMHeadModel

    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=100, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    check_size("it", config, [tmp_path / WEIGHTS])


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def gguf(tensors, *entries):
    """The beginning of a GGUF file: of text keys, their type and raw values."""
    content = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries))
    for key, kind, value in entries:
        content += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value
    return content


STRING, ARRAY = 8, 9
LLAMA = ("general.architecture", STRING, struct.pack("<Q", 5) + b"llama")
GGUF = {
    "nothing": b"",
    "garbage": b"garbage" * 100,
    "nothing but its name": b"GGUF",
    "no entries": gguf(0),
    "2**60 tensors": gguf(2**60, LLAMA),
    "cut within an entry": gguf(0, LLAMA, LLAMA)[:-3],
    "a text of 2**60 bytes": gguf(0, ("general.architecture", STRING, struct.pack("<Q", 2**60))),
    "a list of 2**60 bytes": gguf(0, LLAMA, ("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", 0, 2**60))),
    "an unknown architecture": gguf(0, ("general.architecture", STRING, struct.pack("<Q", 4) + b"evil")),
}


@pytest.mark.parametrize("content", GGUF.values(), ids=GGUF)
def test_a_damaged_gguf_file_is_refused(tmp_path, content):
    (tmp_path / "model.gguf").write_bytes(content)
    refusal(tmp_path / "model.gguf", match=r"cannot load .*model\.gguf", folder=tmp_path)


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [5, 1.5, True, b"model", [], object(), "x" * 5000, "/" + "x" * 5000, "a\0b"], ids=type)
@pytest.mark.parametrize("as_adapter", [False, True])
def test_what_is_no_name_is_refused(workshop, name, as_adapter):
    refusal(*((workshop / "model", name) if as_adapter else (name,)), match="", folder=workshop)


@pytest.mark.parametrize("as_adapter", [False, True])
def test_a_file_a_loop_of_links_and_an_empty_folder_are_named(workshop, tmp_path, as_adapter):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    for name, match in (("loop", "there is no folder"), ("file", "is a file: name the folder"), ("empty", "has no ")):
        names = (workshop / "model", tmp_path / name) if as_adapter else (tmp_path / name,)
        assert f"FOLDER/{name}" in refusal(*names, match=match, folder=tmp_path)


# ---- from the hub ---------------------------------------------------------------------------------------------------


def test_what_is_kept_of_the_hub_is_checked_likewise(workshop, model, adapter, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "kept"))
    keep(workshop / "model", tmp_path, "someone/model")
    keep(workshop / "adapter", tmp_path, "someone/adapter")
    acgpt.load("someone/model", "someone/adapter")
    keys(vocab_size=10**12)(model)
    keys(ADAPTER_CONFIG, r=10**9)(adapter)
    keep(model, tmp_path, "someone/other")
    keep(adapter, tmp_path, "someone/others")
    refusal("someone/model", "someone/others", match=WANTS, folder=tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was built"))
    refusal("someone/other", match="64,000,000,018,592 parameters", folder=tmp_path)


def keep(folder, root, name):
    """Copy a folder into the cache of the hub's client."""
    kept = root / "kept" / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, kept / "snapshots" / ("0" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)


# ---- the commands ---------------------------------------------------------------------------------------------------


COMMANDS = {
    "score": ["score", "The {{cat}}.", "-m", "MODEL"],
    "score from standard input": ["score", "-", "-m", "MODEL"],
    "rank": ["rank", "The {{cat|dog}}.", "-m", "MODEL"],
    "infill": ["infill", "The {{_2}}.", "-m", "MODEL", "-a", "ADAPTER"],
    "show": ["show", "The {{cat}}.", "-m", "MODEL"],
    "evaluate": ["evaluate", "MODEL", "CORPUS", "--length", "30"],
    "merge": ["merge", "MODEL", "ADAPTER", "-o", "OUTPUT"],
    "finetune": ["finetune", "-b", "MODEL", "-c", "CORPUS", "-o", "OUTPUT", "device=cpu", "length=31"],
    "finetune --full": ["finetune", "--full", "-b", "MODEL", "-c", "CORPUS", "-o", "OUTPUT", "device=cpu", "length=31"],
    "prepare": ["prepare", "TEXT", "-t", "MODEL", "-o", "OUTPUT"],
}
WEIGHTLESS = ("show", "prepare")  # they read the tokenizer alone


def invoke(command, workshop, tmp_path, **folders):
    """Run a command on the files of the workshop, some of them replaced."""
    (tmp_path / "text.txt").write_text("The cat sat on the mat.\n")
    places = {"MODEL": workshop / "model", "ADAPTER": workshop / "adapter", "CORPUS": workshop / "corpus"}
    places |= {"OUTPUT": tmp_path / "output", "TEXT": tmp_path / "text.txt", **folders}
    return CliRunner().invoke(app, [str(places.get(word, word)) for word in COMMANDS[command]], input="y\n" * 9)


def assert_refused(result, match):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *before, error = result.stderr.splitlines()
    assert error.startswith("error: ") and match in error
    assert all(line.startswith("warning: ") or "/output" in line for line in before)  # training says where it writes


DAMAGES = ["vocabulary of 4 * 10**7", "pickle of torch", "NaN"]  # to what commands that load a model read
TOKENIZER = "tokenizer that is deep"


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for command in COMMANDS for name in (TOKENIZER, *(DAMAGES if command not in WEIGHTLESS else ()))],
)
def test_a_command_ends_with_code_2_and_one_line(workshop, tmp_path, command, name):
    model = Path(shutil.copytree(workshop / "model", tmp_path / "damaged"))
    damage, _ = (NOT_BUILT | BUILT)[name]
    damage(model)
    assert_refused(invoke(command, workshop, tmp_path, MODEL=model), str(model))
    assert not list((tmp_path / "output").glob("**/*.safetensors"))


@pytest.mark.parametrize("command", ["infill", "merge"])
@pytest.mark.parametrize("name", ["rank of 10**9", "pickle", "NaN"])
def test_a_command_with_a_damaged_adapter_ends_with_code_2_and_one_line(workshop, tmp_path, command, name):
    adapter = Path(shutil.copytree(workshop / "adapter", tmp_path / "damaged"))
    damage, _ = ADAPTERS[name]
    damage(adapter)
    assert_refused(invoke(command, workshop, tmp_path, ADAPTER=adapter), str(adapter))
