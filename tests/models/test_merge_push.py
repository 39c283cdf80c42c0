"""An adapter merged into its model, a card that tells of it, and both sent to the hub (a stand-in)."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import numpy as np
import pytest
import torch
import yaml
from models import tiny_model, trained_bpe
from safetensors import SafetensorError
from safetensors.torch import load_file
from shelves import lora, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import acgpt
from acgpt import InputError, LanguageModel, Metadata, ModelError, OutputError
from acgpt.cli.main import app
from acgpt.models.card import card, write_card
from acgpt.models.merge import merge
from acgpt.models.metadata import DEFAULT_HUB_ID, FILE, weights_hash
from acgpt.models.push import send
from acgpt.query.conditioning import Conditioning

peft = pytest.importorskip("peft")

TEMPLATES = ["The {{cat}} sat on the mat.", "The {{cat}} sat on the {{mat}}.", "{{The cat sat}}"]
CONDITIONING = Conditioning.from_dict({"r_max": 0.4, "infilling": 0.5}).as_dict()


def scores(lm):
    return [token.log_prob for score in lm.log_prob(TEMPLATES, future=True) for token in score.tokens]


def exactly(values, by=1e-9):
    return pytest.approx(values, rel=0, abs=by)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Forbid network access, and hide any token of the user."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)


def make_adapter(folder, network, *targets, metadata=None):
    lora(network, *(targets or ("q_proj", "down_proj")), seed=1).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's own card
    (metadata or Metadata(conditioning=CONDITIONING, bos_token_id=1, mask_token_id=2)).write(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A base in bfloat16 and an adapter for it. Not to be changed."""
    home = tmp_path_factory.mktemp("pair")
    lm = LanguageModel(tiny_model(vocabulary=324, scale=0.15).bfloat16(), tokenizer())
    lm.save_pretrained(home / "base")
    network = AutoModelForCausalLM.from_pretrained(home / "base")
    known = Metadata(conditioning=CONDITIONING, bos_token_id=1, mask_token_id=2, base_hash=weights_hash(network))
    make_adapter(home / "adapter", network, metadata=known)
    return home / "base", home / "adapter"


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(word) for word in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    return result


# ---- merging -------------------------------------------------------------------------------------------------------


def test_what_is_merged_answers_as_the_model_with_its_adapter_does(pair, tmp_path):
    base, adapter = pair
    run("merge", base, adapter, "-o", tmp_path / "merged", "--dtype", "float64")
    merged, adapted = acgpt.load(tmp_path / "merged", dtype="float64"), acgpt.load(base, adapter, dtype="float64")
    assert scores(merged) == exactly(scores(adapted))
    assert scores(merged) != exactly(scores(acgpt.load(base, dtype="float64")), by=0.1)
    assert merged.adapters == {} and merged.log_prob(TEMPLATES[0]).adapter is None


def test_what_is_merged_is_a_plain_model_that_says_what_the_adapter_said(pair, tmp_path):
    base, adapter = pair
    (answer,) = [json.loads(run("merge", base, adapter, "-o", tmp_path / "merged", "--json").stdout)]
    folder = tmp_path / "merged"
    model, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**words("The cat sat", return_tensors="pt")).logits
    assert model.dtype == torch.bfloat16 and torch.isfinite(logits).all()  # as the base had it
    metadata, now = Metadata.read(adapter), Metadata.read(folder)
    assert (now.method, now.conditioning, now.bos_token_id, now.mask_token_id) == ("ac-gpt", CONDITIONING, 1, 2)
    assert metadata.base_hash is not None and now.base_hash is None  # it is a model now, of no base
    assert json.loads((folder / "config.json").read_text())["acgpt"] == json.loads((folder / FILE).read_text())
    assert answer == {
        "folder": str(folder),
        "base": str(base),
        "adapter": str(adapter),
        "dtype": "bfloat16",
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": (folder / "model.safetensors").stat().st_size,
        "method": "ac-gpt",
        "conditioning": CONDITIONING,
        "bos_token_id": 1,
        "mask_token_id": 2,
    }
    assert not list(folder.glob("adapter*")) and not [p for p in tmp_path.iterdir() if p != folder]


def test_an_adapter_is_merged_into_the_base_that_its_config_names(pair, tmp_path):
    base, adapter = pair
    run("merge", base, adapter, "-o", tmp_path / "both")
    run("merge", adapter, "-o", tmp_path / "alone")
    both, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("both", "alone"))
    assert both.keys() == alone.keys() and all(torch.equal(both[name], alone[name]) for name in both)
    moved = shutil.copytree(adapter, tmp_path / "moved")
    named = {
        str(tmp_path / "gone"): "there is no folder",
        "gone": "names gone as its base",
        None: "names no base model",
    }
    for base_name, told in named.items():
        config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": base_name}
        (moved / "adapter_config.json").write_text(json.dumps(config))
        refused = run("merge", moved, "-o", tmp_path / "merged", code=2).stderr
        assert told in refused and "acgpt merge BASE ADAPTER" in refused
    run("merge", base, moved, "-o", tmp_path / "merged")


def test_an_adapter_that_is_not_there_is_not_said_to_name_no_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = run("merge", "runs/adaptr", "-o", "merged", code=2).stderr
    assert "cannot load the adapter runs/adaptr: there is no such folder here" in told


def test_weights_are_merged_in_float32_and_rounded_once(pair, tmp_path):
    """The oracle is the definition of LoRA: W + B A · alpha / r, in float64, rounded to bfloat16."""
    base, adapter = pair
    merge(str(base), str(adapter), tmp_path / "merged")
    name = "model.layers.1.mlp.down_proj"
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    lora = load_file(adapter / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
    want = (before[f"{name}.weight"].double() + b @ a * 8 / 8).float().bfloat16()
    assert torch.equal(after[f"{name}.weight"], want)
    untouched = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(after[untouched], before[untouched])


def test_a_base_in_a_gguf_file_is_unpacked(tmp_path):
    gguf = write_gguf(tmp_path / "tiny.gguf")
    network = acgpt.load(gguf).model
    make_adapter(tmp_path / "adapter", network, metadata=Metadata(bos_token_id=0, mask_token_id=2))
    written = merge(str(gguf), str(tmp_path / "adapter"), tmp_path / "merged")
    assert written["dtype"] == "float32"
    adapted = acgpt.load(gguf, tmp_path / "adapter", dtype="float64")
    assert scores(acgpt.load(tmp_path / "merged", dtype="float64")) == exactly(scores(adapted), by=1e-4)
    merge(str(gguf), str(tmp_path / "adapter"), tmp_path / "wide", dtype="float64")
    assert scores(acgpt.load(tmp_path / "wide", dtype="float64")) == exactly(scores(adapted))


def write_gguf(path):
    """A tiny Llama with the tiny tokenizer, its matrices quantised to 8 bits."""
    gguf = pytest.importorskip("gguf")
    content = json.loads(trained_bpe())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 64,
        "head_count": 4,
        "head_count_kv": 2,
        "layer_norm_rms_eps": 1e-5,
        "rope_dimension_count": 8,
        "rope_freq_base": 10_000.0,
        "vocab_size": len(tokens),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "default",
        "token_list": tokens,
        "token_types": [1] * len(tokens),
        "token_merges": [" ".join(rule) for rule in content["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }.items():
        getattr(writer, f"add_{name}")(value)
    matrices = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    matrices |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    shapes = {f"blk.0.{name}": shape for name, shape in matrices.items()}
    shapes |= {"token_embd": (len(tokens), 32), "output": (len(tokens), 32)}
    rng, packed = np.random.default_rng(0), gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = rng.normal(0, 0.15, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, packed), raw_dtype=packed)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EXISTING = {
    "folder": lambda path: (path.mkdir(), (path / "thesis.txt").write_text("mine")),
    "empty folder": Path.mkdir,
    "file": lambda path: path.write_text("mine"),
    "dangling link": lambda path: path.symlink_to(path.with_name("nowhere")),
}


@pytest.mark.parametrize("make", EXISTING.values(), ids=EXISTING)
def test_nothing_that_is_there_is_overwritten(pair, tmp_path, make, monkeypatch):
    make(tmp_path / "merged")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("acgpt.models.loading.load_base", lambda *_: pytest.fail("it was loaded first"))
    assert "is there already" in run("merge", *pair, "-o", tmp_path / "merged", code=2).stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device"), KeyboardInterrupt()]
)
def test_a_merge_that_fails_leaves_nothing_behind(pair, tmp_path, monkeypatch, error):
    def save_pretrained(self, folder, *_, **__):
        (Path(folder) / "half").write_text("a file")
        raise error

    monkeypatch.setattr(type(tokenizer()), "save_pretrained", save_pretrained)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OutputError):
        merge(str(pair[0]), str(pair[1]), tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_comes_into_being_meanwhile_stays(pair, tmp_path, monkeypatch):
    target, save = tmp_path / "merged", type(tokenizer()).save_pretrained

    def save_pretrained(self, folder, *args, **how):
        target.mkdir()
        (target / "thesis.txt").write_text("mine")
        return save(self, folder, *args, **how)

    monkeypatch.setattr(type(tokenizer()), "save_pretrained", save_pretrained)
    with pytest.raises(OutputError, match="merged"):
        merge(str(pair[0]), str(pair[1]), target)
    assert [p.name for p in tmp_path.rglob("*")] == ["merged", "thesis.txt"]


def test_what_would_answer_otherwise_is_not_written(tmp_path):
    """Refuse an adapter of the head alone if the head is tied to the embeddings: merging would change both."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    LanguageModel(tiny_model(vocabulary=324, tie_word_embeddings=True), tokenizer()).save_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's
        make_adapter(adapter, AutoModelForCausalLM.from_pretrained(base), "lm_head")
        with pytest.raises(ModelError, match="differ from the original"):
            merge(str(base), str(adapter), tmp_path / "merged")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_what_cannot_be_merged_is_named(pair, tmp_path):
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(pair[0]), config).save_pretrained(tmp_path / "prompt")
    assert "virtual tokens" in run("merge", pair[0], tmp_path / "prompt", "-o", tmp_path / "x", code=2).stderr
    assert not (tmp_path / "x").exists()


def test_an_adapter_without_a_word_makes_an_ordinary_model(pair, tmp_path):
    make_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(pair[0]))
    (tmp_path / "adapter" / FILE).unlink()
    merge(str(pair[0]), str(tmp_path / "adapter"), tmp_path / "merged")
    assert Metadata.read(tmp_path / "merged").method == "gpt"


# ---- cards ---------------------------------------------------------------------------------------------------------

MODES = {
    "unconditional": {"perplexity": 21.345, "interval": [20.1, 22.2], "tokens": 12345},
    "infilling": None,
    "training": {"perplexity": None, "interval": None, "tokens": 3},
}


def front(text):
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_a_card_says_what_the_metadata_and_the_results_say():
    results = {
        "base_model": "someone/base",
        "data": "WikiText-103",
        "modes": MODES,
        "set": {"split": "test", "r_max": 0.6},
    }
    head, body = front(card("mine", Metadata(conditioning=CONDITIONING), results, "/home/me/base"))
    assert head["library_name"] == "peft" and head["base_model"] == "someone/base" and "acgpt" in head["tags"]
    assert "| data | WikiText-103 |" in body and json.dumps(CONDITIONING) in body
    assert "| unconditional | 21.35 | 20.10 to 22.20 | 12,345 |" in body or "| unconditional | 21.34 |" in body
    assert "| infilling | -- | -- | -- |" in body and "| training | ∞ | -- | 3 |" in body
    assert "the split test, r_max 0.6" in body
    head, body = front(card("mine", Metadata(method="gpt"), {}, None))
    assert head["library_name"] == "transformers" and "base_model" not in head and "Perplexity" not in body


def test_a_card_of_a_training_run_is_made_from_its_results_file():
    results = {"recipe": {"corpus": "/home/me/data/wikitext"}, "evaluation": {"modes": MODES}}
    _, body = front(card("mine", Metadata(), results, None))
    assert "| data | wikitext |" in body and "| infilling | -- |" in body


@pytest.mark.parametrize("base", ["/home/me/secret/base", "./base", "base", "a/b/c"])
def test_a_path_on_this_machine_is_not_told(base):
    head, body = front(card("mine", Metadata(), {"base_model": base}, base))
    assert "base_model" not in head  # the hub would refuse the whole card
    assert "secret" not in body and "| base model | " in body


def test_a_relative_path_that_looks_like_a_hub_id_is_not_told_either(tmp_path, monkeypatch):
    assert front(card("mine", Metadata(), {"base_model": "runs/base"}, None))[0]["base_model"] == "runs/base"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "base").mkdir(parents=True)
    assert "base_model" not in front(card("mine", Metadata(), {"base_model": "runs/base"}, None))[0]


def test_what_is_named_oddly_breaks_neither_table_nor_front_matter():
    text = card("a | b\n# c", Metadata(), {"data": "x | y\n---\nz", "base_model": "o/n"}, None)
    head, body = front(text)
    assert head["base_model"] == "o/n" and "| data | x \\| y --- z |" in body and "\n# c" not in text


def code_of(text):
    """The lines for acgpt, and for an adapter those for PEFT."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_lines_on_a_card_load_the_model_and_ask_it(pair, tmp_path, capsys):
    base, adapter = pair
    merge(str(base), str(adapter), tmp_path / "merged")
    (of_model,) = code_of((tmp_path / "merged" / "README.md").read_text())
    of_adapter, of_peft = (
        text.replace("FOLDER OR HUB ID", str(adapter)).replace("'base'", repr(str(base)))
        for text in code_of(card("x", Metadata.read(adapter), {}, str(base)))
    )
    assert len(of_model.splitlines()) == len(of_adapter.splitlines()) == 5
    exec(of_model.replace("FOLDER OR HUB ID", str(tmp_path / "merged")), {})
    exec(of_adapter, {})
    printed = capsys.readouterr().out.splitlines()
    assert len([line for line in printed if line.startswith("The cat")]) >= 6
    exec(of_peft, loaded := {})
    ids = torch.tensor([[1, 5, 9, 11]])
    adapted = acgpt.load(base, adapter).model(input_ids=ids).logits
    assert torch.allclose(loaded["model"](input_ids=ids).logits.float(), adapted.float(), atol=0.1)


@pytest.mark.parametrize(
    ("base", "named"),
    [("someone/base", "someone/base"), ("/home/me/Qwen3-1.7B", "Qwen3-1.7B"), ("", "BASE MODEL")],
)
def test_the_lines_for_an_adapter_name_the_base_as_far_as_it_is_known(base, named):
    of_acgpt, of_peft = code_of(card("x", Metadata(), {}, base))
    assert f"load({named!r}, adapter=" in of_acgpt
    assert f"AutoModelForCausalLM.from_pretrained({named!r})" in of_peft


def test_the_lines_for_an_adapter_of_the_embedded_model_name_it_for_acgpt_and_its_original_for_peft():
    of_acgpt, of_peft = code_of(card("x", Metadata(), {}, DEFAULT_HUB_ID))
    assert "load('default', adapter=" in of_acgpt and repr(DEFAULT_HUB_ID) in of_peft
    assert len(code_of(card("x", Metadata(), {}, "model.Q4_1.gguf"))) == 1  # which transformers reads otherwise


def test_a_merged_model_has_a_card_that_names_both_parts(pair, tmp_path):
    merge(str(pair[0]), str(pair[1]), tmp_path / "merged")
    head, body = front((tmp_path / "merged" / "README.md").read_text())
    assert head["library_name"] == "transformers" and body.lstrip().startswith("# merged\n")
    assert "| merged adapter | adapter |" in body and str(pair[0].parent) not in body


def test_nobody_s_readme_is_overwritten(tmp_path):
    Metadata().write(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    assert write_card(tmp_path) is None and (tmp_path / "README.md").read_text() == "mine"
    (tmp_path / "README.md").unlink()
    assert write_card(tmp_path) == tmp_path / "README.md"
    assert f"# {tmp_path.name}" in (tmp_path / "README.md").read_text()
    (tmp_path / FILE).unlink()
    with pytest.raises(InputError, match=re.escape(FILE)):
        write_card(tmp_path)


# ---- sharing -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Write the files of a model folder without a real model."""
    folder = tmp_path / "model"
    (folder / "sub [1]").mkdir(parents=True)
    for name, size in {"config.json": 3, "model.safetensors": 1000, "README.md": 5, "sub [1]/notes.txt": 7}.items():
        (folder / name).write_bytes(b"x" * size)
    Metadata().write(folder)
    for hidden in (".git/config", ".cache/huggingface/token", ".env", "__pycache__/x.pyc"):
        (folder / hidden).parent.mkdir(parents=True, exist_ok=True)
        (folder / hidden).write_text("secret")
    return folder


SENT = ["README.md", FILE, "config.json", "model.safetensors", "sub [1]/notes.txt"]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub: repositories and what was sent to them."""
    repositories, calls = {}, []

    class Api:
        def create_repo(self, repo_id, *, private=None, exist_ok=False):
            assert exist_ok
            calls.append("create_repo")
            repositories.setdefault(repo_id, SimpleNamespace(private=private, files={}))

        def repo_info(self, repo_id):
            return repositories[repo_id]

        def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
            calls.append("upload_folder")
            for path in Path(folder_path).rglob("*"):
                name = path.relative_to(folder_path).as_posix()
                if path.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                    repositories[repo_id].files[name] = path.stat().st_size
            return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return SimpleNamespace(repositories=repositories, calls=calls, api=Api)


@pytest.mark.parametrize("private", [False, True])
def test_what_a_dry_run_shows_is_what_is_sent(folder, hub, private):
    options = ["--json"] + ["--private"] * private
    dry = json.loads(run("push", folder, "me/mine", "--dry-run", *options).stdout)
    assert hub.calls == [] and (dry["sent"], dry["commit"]) == (False, None)
    real = json.loads(run("push", folder, "me/mine", *options).stdout)
    assert (real["sent"], real["commit"]) == (True, "https://hub/me/mine/commit/1")
    sent = hub.repositories["me/mine"]
    assert sent.private is private is dry["private"]
    assert {file["path"]: file["bytes"] for file in dry["files"]} == sent.files
    assert sorted(sent.files) == sorted(SENT) and dry["bytes"] == sum(sent.files.values())
    assert {**dry, "sent": True, "commit": real["commit"]} == real and dry["url"].endswith("/me/mine")


def test_a_dry_run_needs_neither_network_nor_token_and_tells_people_all(folder):
    shown = run("push", folder, "me/mine", "--dry-run", "--private").stdout
    assert all(name in shown for name in SENT) and "1,000" in shown
    assert "would be uploaded to" in shown and "me/mine" in shown and "(private)" in shown
    assert "secret" not in shown and ".env" not in shown
    assert "(public)" in run("push", folder, "me/mine", "--dry-run").stdout


@pytest.mark.parametrize("name", ["pytorch_model.bin", "training_args.bin", "optimizer.pt", "x.pth", "sub/x.PKL"])
def test_a_folder_with_a_pickle_is_refused_with_the_reason(folder, hub, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"")
    for options in ([], ["--dry-run"]):
        output = run("push", folder, "me/mine", *options, code=2).stderr
        assert name in output and "run any code" in output
    assert hub.calls == []


def test_what_is_no_model_is_refused(folder, hub):
    link = folder / "link.txt"
    link.symlink_to("/etc/hostname")
    assert "is a symbolic link" in run("push", folder, "me/mine", code=2).stderr
    link.unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    assert "no weights" in run("push", folder, "me/mine", code=2).stderr
    (folder / "config.json").rename(folder / "adapter_config.json")
    run("push", folder, "me/mine")
    for name in ("a/b/c", "a b/c", "/x", "me/-x-"):
        assert (
            "repository" in run("push", folder, name, code=2).stderr
            or "owner" in run("push", folder, name, code=2).stderr
        )


def test_a_model_without_the_head_for_lengths_that_it_names_is_refused(folder, hub):
    Metadata(lengths={"file": "length_head.safetensors", "distance": 16}).write(folder)
    assert "no length_head.safetensors" in run("push", folder, "me/mine", code=2).stderr and hub.calls == []
    (folder / "length_head.safetensors").write_bytes(b"x")
    run("push", folder, "me/mine")


def test_what_others_will_miss_is_said(folder):
    (folder / "README.md").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/home/me/base"}')
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    shown = run("push", folder, "me/mine", "--dry-run").stdout
    assert "no README.md" in shown and "'/home/me/base'" in shown
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    assert "base_model_name_or_path" not in run("push", folder, "me/mine", "--dry-run").stdout


def test_offline_or_logged_out_is_said_before_anything_is_sent(folder, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "hf auth login" in run("push", folder, "me/mine", code=2).stderr
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in run("push", folder, "me/mine", code=2).stderr
    assert hub.calls == []


def test_a_public_repository_gets_nothing_that_was_meant_to_be_private(folder, hub):
    hub.repositories["me/mine"] = SimpleNamespace(private=False, files={})
    assert "is public" in run("push", folder, "me/mine", "--private", code=2).stderr
    assert hub.calls == ["create_repo"] and hub.repositories["me/mine"].files == {}
    hub.repositories["me/hidden"] = SimpleNamespace(private=True, files={})
    run("push", folder, "me/hidden")  # the other way round it stays private
    assert hub.repositories["me/hidden"].private


def test_what_the_hub_refuses_is_an_error_without_a_traceback(folder, hub, monkeypatch):
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    for error in (HTTPError("403 Forbidden"), OfflineModeIsEnabled("no way out"), OSError("connection\nreset")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(hub.api, "create_repo", fail)
        with pytest.raises(InputError, match=r"the upload to me/mine failed: (403|no way|connection reset)"):
            send(folder, [], "me/mine", private=False)
    result = run("push", folder, "me/mine", code=2)
    assert result.stderr.startswith("error: the upload to me/mine failed") and result.stdout == ""


def test_merge_and_push_return_what_the_commands_print(pair, tmp_path):
    printed = json.loads(run("merge", *pair, "-o", tmp_path / "command", "--json").stdout)
    assert acgpt.merge(*pair, tmp_path / "function") == printed | {"folder": str(tmp_path / "function")}
    printed = json.loads(run("push", tmp_path / "function", "me/mine", "--dry-run", "--json").stdout)
    assert acgpt.push(tmp_path / "function", "me/mine", dry_run=True) == printed
