"""Tiny models that commands answer with."""

from __future__ import annotations

import pytest
from models import tiny_model
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import Metadata


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two folders with the same weights and 64 positions: one says that it reads the future, the other says nothing.

    Tests must not change them.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    texts = ["The capital of France is Paris, they say.", "The cat sat on the mat; the dog did not."] * 20
    bpe.train_from_iterator(texts, vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
    folders = {}
    for name, metadata in (("reads", Metadata()), ("plain", None)):
        folders[name] = str(tmp_path_factory.mktemp(name))
        model = tiny_model(vocabulary=len(tokenizer), positions=64)
        LanguageModel(model, tokenizer, metadata=metadata).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def lms(models):
    """The models of the folders."""
    return {name: acgpt.load(folder, device="cpu") for name, folder in models.items()}


@pytest.fixture
def cli(models):
    """Run a command in this process on one of the two models."""

    def run(*arguments, model="reads", code=0, stdin=None, **env):
        env = {"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": "200", **env}
        result = CliRunner().invoke(app, [*arguments, "--model", models[model]], input=stdin, env=env)
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run
