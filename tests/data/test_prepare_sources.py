"""What is prepared, from disk and from the hub, and which split it goes to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from texts import EOS, NUMBERS, ORACLES, by_documents, by_lines, compress, held_out, jsonl, parquet, tokens

from acgpt.data import prepare as corpus_prepare
from acgpt.data import sources
from acgpt.data.prepare import Progress
from acgpt.errors import InputError

# ---- splits and sources ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 7])
def test_documents_are_held_out_as_documented(run, small, tokenizer, tmp_path, seed):
    texts = [f"document {number}\nline two of {number}" for number in range(120)]
    files = [jsonl(tmp_path / "a.jsonl", texts[:70]), jsonl(tmp_path / "b.jsonl", texts[70:])]
    corpus = run(files, validation=0.25, seed=seed, convention="lines")
    places = [(0, number) for number in range(70)] + [(1, number) for number in range(50)]
    chosen = [held_out(seed, *place, 0.25) for place in places]
    assert 15 < sum(chosen) < 50
    for split, wanted in (("train", False), ("validation", True)):
        expected = by_lines(tokenizer, [text for text, out in zip(texts, chosen, strict=True) if out == wanted])
        assert tokens(corpus, split) == expected
    assert corpus.splits["validation"].documents == sum(chosen)


def test_bad_rows_do_not_move_what_is_held_out(run, tmp_path):
    texts = [f"document {number}" for number in range(60)]
    whole = run(jsonl(tmp_path / "a.jsonl", texts), tmp_path / "whole", validation=0.3)
    rows = (tmp_path / "a.jsonl").read_text().splitlines()
    kept = next(number for number in range(60) if not held_out(0, 0, number, 0.3))
    rows[kept] = "not JSON"
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    rest = run(tmp_path / "b.jsonl", tmp_path / "rest", validation=0.3, skip_bad=True)
    assert tokens(rest, "validation") == tokens(whole, "validation")


def test_sources_go_to_the_splits_they_are_named_for(run, tokenizer, tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    named = [tmp_path / "b.txt", f"test={tmp_path}/a.txt", f"train={tmp_path}/d.txt", f"extra_2={tmp_path}/c.txt"]
    corpus = run(named)
    results = {split: tokens(corpus, split) for split in corpus.splits}
    assert results == {
        "train": by_documents(tokenizer, ["text b", "text d"]),
        "test": by_documents(tokenizer, ["text a"]),
        "extra_2": by_documents(tokenizer, ["text c"]),
    }


def test_folders_and_globs_stand_for_their_files_in_order(run, tokenizer, tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("c.txt", "a.txt", "sub/b.txt", ".hidden.txt", ".git/x.txt", "README.md"):
        (folder / name).write_text(f"text {name}")
    assert tokens(run(folder, tmp_path / "1")) == by_documents(
        tokenizer, ["text a.txt", "text c.txt", "text sub/b.txt"]
    )
    assert tokens(run(f"{folder}/*.txt", tmp_path / "2")) == by_documents(tokenizer, ["text a.txt", "text c.txt"])


def test_too_few_documents_to_hold_any_out_is_said(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.warns(UserWarning, match=r"no document was held out, .*`validation=0.0001`.*validation=PATH"):
        corpus = run(file, validation=0.0001)
    assert len(corpus.tokens("validation")) == 0
    seed = next(seed for seed in range(100) if held_out(seed, 0, 0, 0.5))
    with pytest.warns(UserWarning, match="every document was held out"):
        corpus = run(file, tmp_path / "other", validation=0.5, seed=seed)
    assert len(corpus.tokens("train")) == 0


@pytest.mark.parametrize("convention", ORACLES)
@pytest.mark.parametrize("seed", [0, 3])
def test_pieces_of_a_few_text_files_are_held_out(run, small, tokenizer, tmp_path, monkeypatch, convention, seed):
    monkeypatch.setattr(corpus_prepare, "PIECE", 200)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    texts = ["".join(f"{number} naïve {word}\n" for number, word in enumerate(NUMBERS[start::2])) for start in (0, 1)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    chosen = 0.1  # with seed 0 a whole file would be, half of what there is
    assert held_out(0, 0, 0, chosen) and not held_out(3, 0, 0, chosen)
    corpus = run(files, validation=chosen, seed=seed, convention=convention)
    expected = {"train": [], "validation": []}
    for part, text in enumerate(texts):
        at, before = 0, None
        for line in text.splitlines(keepends=True):
            split = "validation" if held_out(seed, part, at // 200, chosen) else "train"
            if split != before:
                expected[split].append("")
            expected[split][-1] += line
            at, before = at + len(line.encode()), split
    assert len(expected["validation"]) > 5
    decode = corpus.tokenizer().decode
    for split, stretches in expected.items():
        got = decode(tokens(corpus, split)).split(EOS)[:-1]
        if convention == "lines":
            assert got == "".join(stretches).splitlines()
        else:  # which may be cut a line earlier or later where a block of what is read ends
            assert sum(map(len, got)) == pytest.approx(sum(map(len, stretches)), rel=0.2)
            assert len({*got} & {*stretches}) > 0.5 * len(stretches)
    everywhere = decode(tokens(corpus)) + decode(tokens(corpus, "validation"))
    words = everywhere.replace(EOS, " " * (convention == "lines")).split()
    assert sorted(words) == sorted("".join(texts).split())  # all of it, and once
    again = run(
        [*compress(files[0])[1:2], files[1]], tmp_path / "again", validation=chosen, seed=seed, convention=convention
    )
    assert again.hash == corpus.hash


def test_many_text_files_are_held_out_as_wholes(run, tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number}")
    corpus = run(f"{tmp_path}/*.txt", validation=0.2)
    assert corpus.splits["validation"].documents == sum(held_out(0, part, 0, 0.2) for part in range(30)) > 0
    assert "piece" not in corpus.manifest["recipe"]


@pytest.mark.parametrize("limit", [1, 25, 40, 47, 1000])
def test_a_limit_takes_the_first_documents_of_train(run, small, tokenizer, tmp_path, limit):
    texts = [f"document {number}" for number in range(60)]
    test = jsonl(tmp_path / "test.jsonl", texts)
    (tmp_path / "c.txt").write_text("one\nand the same\n" * 100)
    sources = [jsonl(tmp_path / "a.jsonl", texts[:30]), f"test={test}", parquet(tmp_path / "b.parquet", texts[30:50])]
    sources += [tmp_path / "c.txt", jsonl(tmp_path / "d.jsonl", texts[50:])]
    ordered = [*texts[:50], (tmp_path / "c.txt").read_text(), *texts[50:]]
    corpus = run(sources, limit=limit)
    assert tokens(corpus) == by_documents(tokenizer, ordered[:limit])
    assert tokens(corpus, "test") == by_documents(tokenizer, texts)
    assert corpus.manifest["limit"] == corpus.manifest["recipe"]["limit"] == limit
    with pytest.raises(InputError, match=rf"limit \(was {limit}, now None\).*`overwrite=True`"):
        run(sources)
    whole = run(sources, tmp_path / "whole")
    assert whole.manifest["limit"] is None and "limit" not in whole.manifest["recipe"]


def test_what_is_held_out_of_a_limit_is_what_is_held_out_of_all(run, tokenizer, tmp_path):
    texts = [f"document {number}" for number in range(60)]
    corpus = run(jsonl(tmp_path / "a.jsonl", texts), validation=0.3, limit=40)
    chosen = [text for number, text in enumerate(texts[:40]) if held_out(0, 0, number, 0.3)]
    assert tokens(corpus, "validation") == by_documents(tokenizer, chosen)


def test_of_many_text_files_few_may_be_taken_and_pieces_of_those_held_out(run, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_prepare, "PIECE", 20)
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text("one line of text\n" * 20)
    corpus = run(f"{tmp_path}/*.txt", validation=0.2, limit=2)
    assert corpus.manifest["recipe"]["piece"] == 20 and corpus.splits["validation"].tokens


# ---- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake hub on disk: `datasets` reads local files, and every call is recorded."""
    import datasets
    import huggingface_hub

    load, calls = datasets.load_dataset, []
    rows = {
        "train": ["", " = One = \n", " text of one \n", "", " more \n"],
        "validation": ["", " = Two = \n"],
        "test": [" = Three = \n", ""],
    }

    def stand_in(path, config, *, split, streaming, revision, trust_remote_code):
        assert trust_remote_code is False
        calls.append((path, config, split, streaming, revision))
        texts = rows[split] if path == "Salesforce/wikitext" else [f"page {number}" for number in range(40)]
        file = parquet(tmp_path / f"{split}.parquet", texts)
        return load(
            "parquet", data_files={split: str(file)}, split=split, streaming=streaming, cache_dir=tmp_path / "hub"
        )

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    revisions = iter(["first", "second", "third"])
    info = lambda path: type("Info", (), {"sha": next(revisions)})  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "dataset_info", info)
    return calls, rows


def test_wikitext_comes_with_its_splits_and_its_convention(run, hub, tokenizer):
    calls, rows = hub
    corpus = run("wikitext-103")
    assert {split: tokens(corpus, split) for split in corpus.splits} == {
        split: by_lines(tokenizer, texts) for split, texts in rows.items()
    }
    assert calls == [("Salesforce/wikitext", "wikitext-103-raw-v1", split, False, "first") for split in rows]
    run("wikitext-103")  # reused: the hub is not asked again, nor for a newer revision
    assert len(calls) == 3
    with pytest.raises(InputError, match="`convention='lines'`"):
        run("wikitext-103", convention="documents")


def test_one_split_of_a_named_data_set_can_be_taken(run, hub, tokenizer, tmp_path):
    _, rows = hub
    corpus = run([jsonl(tmp_path / "a.jsonl", ["mine"]), "test=wikitext-103"])
    assert tokens(corpus) == by_lines(tokenizer, ["mine"])
    assert tokens(corpus, "test") == by_lines(tokenizer, rows["test"])
    assert list(corpus.splits) == ["train", "test"]


def test_fineweb_is_streamed_up_to_its_limit_with_a_share_held_out(run, small, hub, tokenizer, monkeypatch):
    calls, _ = hub
    (fineweb,) = sources.NAMED["fineweb"]
    assert (fineweb.rows, fineweb.validation) == (1_500_000, 0.01)
    monkeypatch.setitem(sources.NAMED, "fineweb", [replace(fineweb, rows=30, validation=0.2)])

    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.documents >= 15:
            raise Stop

    monkeypatch.setattr(corpus_prepare, "CHECKPOINT", 20)
    with pytest.raises(Stop):
        run("fineweb", watch=stop)
    corpus = run("fineweb")
    assert calls == [("HuggingFaceFW/fineweb", "sample-10BT", "train", True, "first")] * 2
    for split, wanted in (("train", False), ("validation", True)):
        texts = [f"page {number}" for number in range(30) if held_out(0, 0, number, 0.2) == wanted]
        assert tokens(corpus, split) == by_documents(tokenizer, texts)


def test_a_limit_goes_before_that_of_a_data_set(run, small, hub, tokenizer, tmp_path, monkeypatch):
    _, rows = hub
    (fineweb,) = sources.NAMED["fineweb"]
    monkeypatch.setitem(sources.NAMED, "fineweb", [replace(fineweb, rows=10, validation=0.0)])
    for limit in (4, 35):
        corpus = run("fineweb", tmp_path / f"{limit}", limit=limit)
        assert tokens(corpus) == by_documents(tokenizer, [f"page {number}" for number in range(limit)])
        assert corpus.manifest["sources"][0]["rows"] == limit
    corpus = run("wikitext-103", limit=2)
    assert [tokens(corpus, split) for split in rows] == [
        by_lines(tokenizer, texts[: 2 if split == "train" else None]) for split, texts in rows.items()
    ]


@pytest.mark.parametrize("broken", ["info", "data"])
def test_a_hub_that_cannot_be_reached_says_what_to_do(run, hub, monkeypatch, broken):
    import datasets
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(*((huggingface_hub, "dataset_info") if broken == "info" else (datasets, "load_dataset")), fail)
    with pytest.raises(InputError, match="no route to host") as caught:
        run("wikitext-103")
    assert "docs/how-to/prepare.md" in str(caught.value)
    assert "HF_HUB_OFFLINE=1" in str(caught.value)


def test_without_a_connection_the_cache_is_used_if_asked_for(run, hub, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda path: pytest.fail("the hub was asked"))
    calls, _ = hub
    run("test=wikitext-103")
    assert calls == [("Salesforce/wikitext", "wikitext-103-raw-v1", "test", False, "main")]
