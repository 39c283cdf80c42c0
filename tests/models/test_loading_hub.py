"""Names of hub models: requests to the hub with and without a connection."""

from __future__ import annotations

import shutil
import sys

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http
from test_loading import network, scores, tokenizer
from typer.testing import CliRunner

import acgpt
from acgpt import InputError, LanguageModel, ModelError
from acgpt.cli.main import app
from acgpt.data.tokenizer import named
from acgpt.models.loading import read_metadata

httpx = sys.modules[type(huggingface_hub.get_session()).__module__.partition(".")[0]]  # httpx, or what has followed it


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A fake hub with an empty cache that fails as configured; returns the list of requested files."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    asked = []

    def fail(kind):
        def answer(request):
            if "/resolve/" in request.url.path:  # else the client asks for itself
                asked.append(request.url.path)
            raise getattr(httpx, kind)("out of order", request=request)

        huggingface_hub.set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(answer)))
        return asked

    yield fail
    huggingface_hub.set_client_factory(_http.default_client_factory)


@pytest.mark.parametrize("kind", ["ConnectError", "ConnectTimeout"])
@pytest.mark.parametrize(
    ("ask", "file"),
    [
        (lambda name, base: acgpt.load(name), "config.json"),
        (lambda name, base: acgpt.load(base, adapter=name), "adapter_config.json"),
        (lambda name, base: named(name), "config.json"),
    ],
    ids=["model", "adapter", "tokenizer"],
)
def test_without_a_connection_a_name_is_asked_for_once_and_said_to_be_neither_here_nor_there(
    hub, ask, file, kind, tmp_path
):
    asked = hub(kind)
    tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match="no-such/model") as caught:
        ask("no-such/model", tmp_path / "base")
    assert asked == [f"/no-such/model/resolve/main/{file}"]
    assert "there is no connection to" in str(caught.value) and "out of order" in str(caught.value)
    assert "Use a local folder, or try again with a connection" in str(caught.value)


def test_the_command_ends_with_code_2_after_one_question(hub):
    asked = hub("ConnectError")
    result = CliRunner().invoke(app, ["score", "The {{cat}}.", "-m", "smolm2"])
    assert result.exit_code == 2 and "cannot load smolm2: there is no such folder" in result.stderr
    assert len(asked) == 1


def test_a_hub_that_is_there_but_slow_is_asked_again(hub):
    asked = hub("ReadTimeout")
    with pytest.raises(ModelError, match="cannot load someone/some-model: there is no such folder"):
        acgpt.load("someone/some-model")
    assert len(asked) > 3


def test_what_is_kept_of_the_hub_needs_no_connection(hub, tmp_path):
    LanguageModel(network(), tokenizer()).save_pretrained(tmp_path / "here")
    kept = tmp_path / "kept" / "models--someone--some-model"
    shutil.copytree(tmp_path / "here", kept / "snapshots" / ("0" * 40))
    (kept / "snapshots" / ("0" * 40) / "acgpt.json").unlink(missing_ok=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    asked = hub("ConnectError")
    want = scores(acgpt.load(tmp_path / "here"), future=False)
    assert not asked
    assert scores(acgpt.load("someone/some-model"), future=False) == want
    asked.clear()
    assert read_metadata("someone/some-model") is None and len(asked) == 1  # what is not kept is asked for once
