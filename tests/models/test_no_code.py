"""No code from a checkpoint is run, whatever it holds and whatever standard input says."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest
from checkpoints import ADAPTER_CONFIG, keys, text
from runs import SMALL
from test_damaged_checkpoints import COMMANDS, assert_refused, invoke

import acgpt
from acgpt import InputError, ModelError
from acgpt.data.corpus import tokenizer_in
from acgpt.data.tokenizer import named
from acgpt.display.reader import choose_reader
from acgpt.evaluation.features import Featurizer
from acgpt.models.merge import merge
from acgpt.report.samples_page import tokenizer_of
from acgpt.training.networks import head_dim
from acgpt.training.recipe import make
from acgpt.training.train import train

pytestmark = pytest.mark.usefixtures("offline")

NO_CODE = "acgpt runs no code from a checkpoint"
CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")


@pytest.fixture
def answers(monkeypatch):
    """Standard input that answers yes to every question."""
    stdin = io.StringIO("y\n" * 20)
    monkeypatch.setattr(sys, "stdin", stdin)
    return stdin


def add_code(folder):
    """Have a folder name classes of its own for config, model and tokenizer, in a file that writes FOLDER/marker."""
    source = f"open({str(folder / 'marker')!r}, 'w').close()\nclass Mine: pass\n"
    (folder / "mine.py").write_text(source)
    auto_map = dict.fromkeys(CLASSES, "mine.Mine")
    keys(model_type="mine", auto_map=auto_map, architectures=["Mine"])(folder)
    keys("tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]})(
        folder
    )


@pytest.fixture
def evil(workshop, tmp_path):
    """A model whose architecture is code in its folder."""
    folder = Path(shutil.copytree(workshop / "model", tmp_path / "evil"))
    add_code(folder)
    return folder


def recipe(workshop, base, output, **more):
    content = {name: value for name, value in SMALL.items() if name != "model"}
    return make(content | {"corpus": str(workshop / "corpus"), "base": str(base), "output": str(output)} | more, "mine")


def reference_from_corpus(workshop, evil, tmp_path):
    shutil.copytree(evil, tmp_path / "corpus" / "tokenizer")
    tokenizer_in(tmp_path / "corpus")


def base_of_adapter(workshop, evil, tmp_path):
    adapter = shutil.copytree(workshop / "adapter", tmp_path / "adapter")
    keys(ADAPTER_CONFIG, base_model_name_or_path=str(evil))(Path(adapter))
    acgpt.load(adapter)


LOADERS = {
    "a model": lambda workshop, evil, tmp_path: acgpt.load(evil),
    "a model with an adapter": lambda workshop, evil, tmp_path: acgpt.load(evil, workshop / "adapter"),
    "the base of an adapter": base_of_adapter,
    "what is drawn": lambda workshop, evil, tmp_path: choose_reader("{{a}}", str(evil))[0],
    "the tokenizer of a new corpus": lambda workshop, evil, tmp_path: named(str(evil)),
    "the tokenizer of a corpus": reference_from_corpus,
    "features": lambda workshop, evil, tmp_path: Featurizer.load(str(evil)),
    "a look at features": lambda workshop, evil, tmp_path: Featurizer.check(str(evil)),
    "a merge": lambda workshop, evil, tmp_path: merge(str(evil), str(workshop / "adapter"), tmp_path / "out"),
    "training": lambda workshop, evil, tmp_path: train(
        recipe(workshop, evil, tmp_path / "out", lora={"rank": 4}), quiet=True
    ),
    "full training": lambda workshop, evil, tmp_path: train(recipe(workshop, evil, tmp_path / "out"), quiet=True),
    "a plan of training": lambda workshop, evil, tmp_path: head_dim(str(evil)),
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_no_loader_runs_code_or_asks_whether_it_may(workshop, evil, tmp_path, answers, capsys, load):
    with pytest.raises(InputError, match=NO_CODE) as caught:
        load(workshop, evil, tmp_path)
    assert not list(tmp_path.glob("**/marker"))
    assert answers.tell() == 0 and capsys.readouterr().out == ""
    assert "trust_remote_code" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_report_takes_no_tokenizer_that_is_code(evil, answers):
    assert tokenizer_of({"tokenizer_hash": "0", "model": str(evil)}, {}) is None
    assert not (evil / "marker").exists() and answers.tell() == 0


def test_a_known_architecture_is_loaded_without_the_code_beside_it(workshop, evil, answers):
    """Many models on the hub have a known architecture and also code of their own."""
    keys(model_type="llama")(evil)
    keys("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")(evil)
    want = acgpt.load(workshop / "model").log_prob("The {{cat}} sat.")
    assert acgpt.load(evil).log_prob("The {{cat}} sat.") == want
    assert not (evil / "marker").exists() and answers.tell() == 0


def test_generation_that_a_model_brings_is_not_run(workshop, tmp_path, answers):
    folder = Path(shutil.copytree(workshop / "model", tmp_path / "model"))
    (folder / "custom_generate").mkdir()
    text("custom_generate/generate.py", f"open({str(folder / 'marker')!r}, 'w').close()\n")(folder)
    acgpt.load(folder).sample("The {{_2}}", seed=0)
    assert not (folder / "marker").exists() and answers.tell() == 0


def test_a_chat_template_is_not_run(workshop, tmp_path):
    folder = Path(shutil.copytree(workshop / "model", tmp_path / "model"))
    text("chat_template.jinja", "{{ 1 / 0 }}")(folder)
    acgpt.load(folder).sample("The {{_2}}", seed=0)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("kernel", ["someone/kernel", "kernels-community/flash-attn2", "someone/kernel@main:run"])
def test_kernels_from_the_hub_are_refused(workshop, tmp_path, key, kernel):
    folder = Path(shutil.copytree(workshop / "model", tmp_path / "model"))
    keys(**{key: kernel})(folder)
    with pytest.raises(ModelError, match=f"attention kernel {kernel}, and {NO_CODE}"):
        acgpt.load(folder)


EVIL = {"base_model_class": "A", "parent_library": "acgpt_test_evil"}


@pytest.fixture
def adapter(workshop, tmp_path, monkeypatch):
    """A copy of the adapter, beside a module that must not be imported."""
    (tmp_path / "acgpt_test_evil.py").write_text("raise SystemExit('run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield Path(shutil.copytree(workshop / "adapter", tmp_path / "adapter"))
    assert "acgpt_test_evil" not in sys.modules


@pytest.mark.parametrize("beside_the_model", [False, True])
def test_a_module_that_an_adapter_names_is_not_imported(workshop, adapter, beside_the_model):
    """Where PEFT imports it, and where transformers has PEFT do so, for an adapter in the folder of the model."""
    module = {"megatron_config": {"hidden_size": 8}, "megatron_core": "acgpt_test_evil.core"}
    keys(ADAPTER_CONFIG, auto_mapping=EVIL, **module)(adapter)
    if beside_the_model:
        shutil.copytree(workshop / "model", adapter, dirs_exist_ok=True)
    folders = (adapter, workshop / "adapter") if beside_the_model else (workshop / "model", adapter)
    with pytest.raises(ModelError, match=NO_CODE):
        acgpt.load(*folders)


def test_a_library_that_an_adapter_names_is_not_imported(workshop, adapter):
    keys(ADAPTER_CONFIG, auto_mapping=EVIL, task_type=None)(adapter)
    acgpt.load(workshop / "model", adapter)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_answered_yes_runs_no_code(workshop, evil, tmp_path, command):
    assert_refused(invoke(command, workshop, tmp_path, MODEL=evil), NO_CODE)
    assert not (evil / "marker").exists()


def test_every_call_that_loads_from_the_hub_says_that_no_code_is_run():
    """Check the source: every `from_pretrained` and `load_dataset` has `trust_remote_code=False`."""
    import ast

    for path in Path(acgpt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of_peft = isinstance(node.func.value, ast.Name) and node.func.value.id.startswith("Peft")
                if node.func.attr in ("from_pretrained", "from_config", "load_dataset") and not of_peft:
                    keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
                    assert keywords.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
