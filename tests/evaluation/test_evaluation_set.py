"""Evaluation datasets, which all methods share: built once, saved, hashed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from runs import write_corpus
from safetensors.numpy import load_file, save_file

from acgpt.data.corpus import Corpus
from acgpt.data.prepare import prepare
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationDataset, dataset_of_corpus
from acgpt.methods import method_of
from acgpt.query.conditioning import ASKED, GIVEN, Conditioning
from acgpt.training.recipe import Recipe
from acgpt.training.train import build_evaluation_sets

CONDITIONAL = ("training", "infilling")


def tokens(count, vocabulary=50):
    return np.random.default_rng(7).integers(2, vocabulary, size=count)


def small_set(texts=6, length=20, **how):
    return EvaluationDataset.build(tokens(texts * length + 3), tokenizer_hash="t", length=length, **how)


def test_texts_are_the_chunks_of_the_split_without_its_tail():
    split = tokens(67)
    assert EvaluationDataset.build(split, tokenizer_hash="t", length=20).tokens.tolist() == [
        split[start : start + 20].tolist() for start in (0, 20, 40)
    ]


def test_a_limit_changes_nothing_in_the_texts_that_are_left():
    whole, limited = small_set(), small_set(limit=4)
    assert len(whole) == 6 and len(limited) == 4
    assert (limited.tokens == whole.tokens[:4]).all()
    for name in CONDITIONAL:
        assert (limited.sampled_roles[name] == whole.sampled_roles[name][:4]).all()
    assert whole.head(4).hash == limited.hash != whole.hash
    assert small_set(limit=100).hash == whole.hash


def test_a_set_is_a_function_of_its_seed_and_each_seed_and_mode_has_its_own():
    sets = {seed: small_set(seed=seed) for seed in (0, 1, 2**32 - 1)}
    assert small_set(seed=0).hash == sets[0].hash
    assert len({s.hash for s in sets.values()}) == 3
    sizes = [tuple((s.sampled_roles[name] == GIVEN).sum(axis=1)) for s in sets.values() for name in CONDITIONAL]
    assert len(set(sizes)) == 6


def test_roles_depend_on_a_texts_number_and_not_on_its_tokens():
    one = small_set()
    other = EvaluationDataset.build(tokens(123)[::-1], tokenizer_hash="t", length=20)
    assert one.hash != other.hash
    assert all((one.sampled_roles[name] == other.sampled_roles[name]).all() for name in CONDITIONAL)


def test_evaluation_draws_other_sets_than_training_under_the_same_seed():
    from acgpt.query.conditioning import generator

    drawn = small_set().sampled_roles["training"]
    for epoch in range(3):
        trained = np.stack([Conditioning().roles(20, generator(0, epoch, item)) for item in range(6)])
        assert not (trained == drawn).all(axis=1).all()


def test_a_set_survives_its_file_and_the_file_is_the_same_each_time(tmp_path):
    training = Conditioning.from_dict({"b_max": 2, "unknown": 0.2})
    saved = small_set(training=training, r_max=0.5, seed=3, corpus_hash="c", split="test")
    saved.save(tmp_path / "new folder" / "set.safetensors")
    saved.save(tmp_path / "again.safetensors")
    loaded = EvaluationDataset.load(tmp_path / "new folder" / "set.safetensors")
    assert json.dumps(loaded.as_dict()) == json.dumps(saved.as_dict()) and loaded.hash == saved.hash
    assert (loaded.tokens == saved.tokens).all()
    assert all((loaded.sampled_roles[name] == saved.sampled_roles[name]).all() for name in CONDITIONAL)
    assert (tmp_path / "new folder" / "set.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["again.safetensors", "new folder", "set.safetensors"]
    assert Conditioning.from_dict(loaded.origin.conditioning) == training


def test_documents_survive_the_file_and_belong_to_the_tokens_that_are_there(tmp_path):
    starts = np.array([0, 3, 41, 60, 110])
    whole = small_set(documents=starts)
    whole.save(tmp_path / "set.safetensors")
    loaded = EvaluationDataset.load(tmp_path / "set.safetensors")
    assert loaded.documents.tolist() == [0, 3, 41, 60, 110] and loaded.hash == whole.hash == small_set().hash
    by_hand = [sum(start <= token for start in starts) - 1 for token in range(120)]
    assert loaded.document_numbers.ravel().tolist() == by_hand and loaded.document_numbers.shape == (6, 20)
    assert whole.head(3).documents.tolist() == small_set(limit=3, documents=starts).documents.tolist() == [0, 3, 41]
    assert (whole.as_dict()["documents"], whole.head(2).as_dict()["documents"]) == (5, 2)
    assert small_set().document_numbers is None and small_set().as_dict()["documents"] is None
    for damaged in ([1, 3], [0, 3, 3], [0, 120], []):
        with pytest.raises(ValueError, match="documents"):
            EvaluationDataset(whole.tokens, whole.sampled_roles, whole.origin, np.array(damaged, dtype=np.int64))


def prepared(folder, texts, convention):
    """A corpus that `acgpt prepare` makes of documents, and the tokens with which they begin."""
    lines = [json.dumps({"text": text}) for text in texts]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    sources = [folder / "train.jsonl", f"test={folder / 'test.jsonl'}"]
    corpus = prepare(sources, folder / "corpus", tokenizer="gpt2", convention=convention, workers=1)
    parts = [text.split("\n") if convention == "lines" else [text] for text in texts]
    counts = [
        sum(len(corpus.tokenizer()(part)["input_ids"]) + 1 for part in document if part.strip()) for document in parts
    ]
    return corpus, np.cumsum([0, *counts[:-1]]).tolist()


ARTICLES = [
    " = Valkyria Chronicles = \n\n Senjō no Valkyria is a game . \n\n = = Gameplay = = \n\n As with others . \n",
    " = Du Fu = \n Du Fu was a poet : 1 = 1 . \n = = = Works = = = \n He wrote = . \n",
    " = A = \n Text . \n",
]


@pytest.mark.parametrize("convention", ["lines", "documents"])
def test_documents_begin_after_eos_or_with_the_titles_of_wikitext(tmp_path, convention):
    corpus, starts = prepared(tmp_path, ARTICLES, convention)
    tokens = len(corpus.tokens("test"))
    assert corpus.document_starts("test", tokens).tolist() == starts
    assert corpus.document_starts("test", starts[2]).tolist() == starts[:2]
    assert corpus.document_starts("test", starts[2] + 1).tolist() == starts
    dataset, _ = dataset_of_corpus(corpus, split="test", length=5)
    assert dataset.documents.tolist() == [start for start in starts if start < dataset.tokens.size]
    recipe = Recipe(steps=1000, conditioning={}, length=5, eval_split="test", eval_texts=2)
    during = build_evaluation_sets(recipe, corpus, method_of("ac-gpt"))
    assert during["final"].documents.tolist() == dataset.documents.tolist()
    assert during["during"].documents.tolist() == [start for start in starts if start < 10]


def test_documents_are_not_known_without_titles_without_eos_and_in_pieces_of_a_file(tmp_path):
    corpus, _ = prepared(tmp_path, ["one line\ntwo lines\n", "another = text =\n"], "lines")
    assert corpus.document_starts("test", 100) is None
    (tmp_path / "mine.txt").write_text("Some words of one text.\n" * 4000)
    pieces = prepare([tmp_path / "mine.txt"], tmp_path / "pieces", tokenizer="gpt2", validation=0.3, workers=1)
    assert (pieces.tokens("validation")[:] == pieces.manifest["eos_token_id"]).sum() > 1
    assert pieces.document_starts("validation", 1000) is None
    (folder := tmp_path / "documents").mkdir()
    corpus, starts = prepared(folder, ["one text", "another"], "documents")
    assert corpus.document_starts("test", 100).tolist() == starts
    manifest = json.loads((corpus.folder / "corpus.json").read_text())
    del manifest["eos_token_id"]
    (corpus.folder / "corpus.json").write_text(json.dumps(manifest))
    assert Corpus.open(corpus.folder).document_starts("test", 100) is None


def test_a_set_that_could_not_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    small_set().save(tmp_path / "set.safetensors")
    before = (tmp_path / "set.safetensors").read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        small_set(seed=1).save(tmp_path / "set.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["set.safetensors"]
    assert (tmp_path / "set.safetensors").read_bytes() == before


def test_the_hash_is_that_of_what_is_asked_given_what_and_not_of_where_it_came_from():
    base = small_set()
    assert small_set(corpus_hash="another", split="validation").hash == base.hash
    assert EvaluationDataset.build(tokens(123), tokenizer_hash="u", length=20).hash != base.hash
    changed = base.tokens.copy()
    changed[2, 5] += 1
    assert EvaluationDataset(changed, base.sampled_roles, base.origin).hash != base.hash
    for name in CONDITIONAL:
        roles = base.sampled_roles[name].copy()
        roles[0, np.flatnonzero(roles[0] == ASKED)[0]] = GIVEN
        assert EvaluationDataset(base.tokens, {**base.sampled_roles, name: roles}, base.origin).hash != base.hash
    swapped = {"training": base.sampled_roles["infilling"], "infilling": base.sampled_roles["training"]}
    assert EvaluationDataset(base.tokens, swapped, base.origin).hash != base.hash


def test_the_hash_of_a_set_made_by_hand_stays_what_it_was():
    """Results that were published under a hash must remain comparable: the format of what is hashed may not change."""
    texts = np.array([[5, 6, 7], [8, 9, 70000]], dtype=np.int32)
    roles = np.array([[1, 0, 0], [0, 2, 1]], dtype=np.int8)
    origin = small_set().origin
    made = EvaluationDataset(texts, {"training": roles, "infilling": roles[::-1]}, origin)
    header = b'["acgpt_evaluation_set", "t", 2, 3, "infilling", "training"]'
    words = b"".join(token.to_bytes(4, "little") for token in (5, 6, 7, 8, 9, 70000))
    content = header + words + bytes([0, 2, 1, 1, 0, 0]) + bytes([1, 0, 0, 0, 2, 1])
    assert made.hash == hashlib.sha256(content).hexdigest()


def rewritten(path, **content):
    """Write the file with some metadata replaced."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        metadata = json.loads(file.metadata()["acgpt_evaluation_set"]) | content
    save_file(load_file(path), path, {"acgpt_evaluation_set": json.dumps(metadata)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_text("a shopping list"), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x02"), "damaged"),
        (lambda path: save_file(load_file(path), path), "not an evaluation dataset"),
        (lambda path: rewritten(path, hash="0" * 64), "damaged"),
        (lambda path: rewritten(path, tokenizer_hash="another"), "damaged"),
        (lambda path: rewritten(path, format_version=2), "format version 2.*Upgrade"),
        (lambda path: rewritten(path, format_version="1"), "damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, damage, message):
    path = tmp_path / "set.safetensors"
    small_set().save(path)
    damage(path)
    with pytest.raises(InputError, match=message):
        EvaluationDataset.load(path)


def test_a_split_with_nothing_in_it_is_named_and_no_length_is_proposed(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    manifest = json.loads((corpus / "corpus.json").read_text())
    manifest["splits"]["validation"] |= {"shards": [], "tokens": 0}
    (corpus / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=f"^validation of {corpus} has 0 tokens.*prepare more text") as error:
        dataset_of_corpus(Corpus.open(corpus), split="validation", length=31)
    assert "--length" not in str(error.value)
