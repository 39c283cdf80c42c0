"""Rows that cannot be used are named, or skipped and counted; and none fills the memory."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import sys
import tracemalloc

import pytest
from texts import GOOD, NUMBERS, ORACLES, TEXTS, by_documents, compress, jsonl, parquet, skipped, tokens

from acgpt.data import rows as corpus_rows
from acgpt.data import sources
from acgpt.data.encode import in_order
from acgpt.errors import InputError

# ---- rows that cannot be used ---------------------------------------------------------------------------------------


BAD_ROWS = {
    b'{"text": "a"': ("line 2", "not JSON"),
    b'["a"]': ("line 2", "not a JSON object"),
    b'{"body": "a", "id": 3}': ("line 2", "no field 'text' (its fields: 'body', 'id'); choose one with `field`"),
    b'{"text": null}': ("line 2", "'text' is null"),
    b'{"text": 3}': ("line 2", "'text' is a int"),
    b'{"text": "caf\xe9"}': ("line 2", "not UTF-8"),
    b'{"text": "\\ud83d"}': ("line 2", "surrogate"),
    b"[" * 100_000: ("line 2", "not JSON"),
}


@pytest.mark.parametrize("row", BAD_ROWS, ids=[why for _, why in BAD_ROWS.values()])
def test_a_bad_row_is_named_or_skipped_and_counted(run, tokenizer, tmp_path, row):
    first = jsonl(tmp_path / "a.jsonl", ["fine"])
    file = tmp_path / "b.jsonl"
    file.write_bytes(GOOD + row + b"\n\n" + GOOD + row)
    where, why = BAD_ROWS[row]
    with pytest.raises(InputError, match=re.escape(f"{file}, {where}: ")) as caught:
        run([first, file])
    assert why in str(caught.value) and "`skip_bad=True`" in str(caught.value)
    corpus = run([first, file], skip_bad=True)  # goes on in the same folder
    assert tokens(corpus) == by_documents(tokenizer, ["fine", "good", "good"])
    assert skipped(corpus) == (2, [0, 2])
    with pytest.raises(InputError, match=r"lacks 2 unusable rows.*`skip_bad=True`"):
        run([first, file])


@pytest.mark.parametrize("convention", ORACLES)
def test_a_line_of_text_that_is_not_utf8_is_named_or_skipped(run, small, tokenizer, tmp_path, convention):
    file = tmp_path / "a.txt"
    lines = [b"line %d" % number for number in range(100)]
    lines[70] = b"caf\xe9"
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=r"a\.txt, line 71: byte 4 of it is not UTF-8"):
        run(file, convention=convention)
    corpus = run(file, convention=convention, skip_bad=True)
    text = "\n".join(line.decode() for number, line in enumerate(lines) if number != 70)
    assert tokens(corpus) == ORACLES[convention](tokenizer, [text])
    assert skipped(corpus) == (1, [1])


def test_what_stands_before_a_bad_row_is_kept(run, small, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", NUMBERS)
    file.write_bytes(file.read_bytes() + b"{\n")
    with pytest.raises(InputError, match="line 301"):
        run(file)
    seen = []
    run(file, skip_bad=True, watch=lambda progress: seen.append(progress.documents))
    assert next(documents for documents in seen if documents) > 290


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize(
    "kind, harm", [("rows", "truncated"), ("rows", "corrupt"), ("lines", "truncated"), ("documents", "truncated")]
)
def test_a_damaged_compressed_file_is_named_or_read_up_to_there(run, small, tokenizer, tmp_path, suffix, harm, kind):
    plain = jsonl(tmp_path / "a.jsonl", NUMBERS) if kind == "rows" else tmp_path / "a.txt"
    if kind != "rows":
        plain.write_text("\n".join(NUMBERS))
    compress(plain)
    first, file = jsonl(tmp_path / "first.jsonl", ["fine"]), plain.with_name(plain.name + suffix)
    raw, options = file.read_bytes(), {"convention": "lines" if kind == "lines" else "documents"}
    half = len(raw) // 2
    file.write_bytes(raw[: half - 30] if harm == "truncated" else raw[: half - 100] + b"\xff" * 60 + raw[half - 40 :])
    with pytest.raises(InputError, match=rf"{file}, line \d+: ") as caught:
        run([first, file], **options)
    line = int(re.search(r"line (\d+)", str(caught.value))[1])
    corpus = run([first, file], skip_bad=True, **options)
    rows = NUMBERS[: line - 1]
    expected = by_documents(tokenizer, ["fine", "\n".join(rows)] if kind == "documents" else ["fine", *rows])
    same = len(expected) - (kind == "documents")  # what there is of the last line belongs to the text
    assert tokens(corpus)[:same] == expected[:same]
    if suffix != ".zst":  # which is unpacked by the 128 kB, more than there are
        assert line > 100
    if harm == "truncated":  # otherwise some of what follows may pass for text: checksums come at the end
        assert tokens(corpus).count(tokenizer.eos_token_id) == expected.count(tokenizer.eos_token_id)
        why = f"line {line}: the file is damaged from here on: it ends too early"
        assert why in str(caught.value) and "skip the rest of the file with `skip_bad=True`" in str(caught.value)
        damage = [source["damaged"] for source in corpus.manifest["sources"]]
        assert damage == [None, f"{why}; the rest of the file is left out"] and corpus.manifest["damaged"] == 1
        assert skipped(corpus) == (1, [0, 1])
        lacks = r"lacks 1 unusable rows and the rest of 1 damaged files: .*`skip_bad=True`"
        with pytest.raises(InputError, match=lacks):
            run([first, file], **options)
    else:
        assert skipped(corpus)[1][1] > 0


def test_a_damaged_parquet_file_is_named_or_skipped(run, tokenizer, tmp_path):
    good = parquet(tmp_path / "a.parquet", ["fine"])
    cut = parquet(tmp_path / "b.parquet", TEXTS)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"b\.parquet, as a whole: the file is damaged"):
        run([cut, good])
    corpus = run([cut, good], skip_bad=True)
    assert tokens(corpus) == by_documents(tokenizer, ["fine"])
    assert skipped(corpus) == (1, [1, 0])
    lost, whole = (source["damaged"] for source in corpus.manifest["sources"])
    assert whole is None and re.fullmatch(r"as a whole: the file is damaged: .*; the file is left out", lost, re.DOTALL)


def test_a_damaged_row_group_costs_its_rows_and_no_others(run, tokenizer, tmp_path):
    import pyarrow
    from pyarrow.parquet import ParquetFile, write_table

    texts = NUMBERS[:30]
    file = tmp_path / "a.parquet"
    write_table(pyarrow.table({"text": texts}), file, row_group_size=10, write_page_checksum=True)
    chunk = ParquetFile(file).metadata.row_group(1).column(0)
    raw = bytearray(file.read_bytes())
    raw[chunk.dictionary_page_offset + chunk.total_compressed_size // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(InputError, match=r"a\.parquet, rows 11 to 20: the file is damaged"):
        run(file)
    corpus = run(file, skip_bad=True)
    assert tokens(corpus) == by_documents(tokenizer, texts[:10] + texts[20:])
    assert skipped(corpus) == (10, [10])


def test_a_parquet_row_that_is_no_text_is_named_by_its_number(run, tokenizer, tmp_path):
    file = parquet(tmp_path / "a.parquet", ["one", None, "two"])
    with pytest.raises(InputError, match=r"a\.parquet, row 2: its 'text' is null"):
        run(file)
    assert tokens(run(file, skip_bad=True)) == by_documents(tokenizer, ["one", "two"])
    with pytest.raises(InputError, match=r"no column 'body'.*'id', 'text'"):
        run(file, tmp_path / "other", field="body")


def test_a_row_too_long_to_hold_is_named_or_skipped(run, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_rows, "LONGEST", 200_000)
    long = "y" * 300_000
    file = jsonl(tmp_path / "a.jsonl", ["one", long, "two"])
    text = tmp_path / "a.txt"
    text.write_text(f"one\n{long}\ntwo\n{long}")
    for source, options in ((file, {}), (text, {"convention": "lines"})):
        folder = tmp_path / f"{source.name}.corpus"
        with pytest.raises(InputError, match="line 2: it is longer than"):
            run(source, folder, **options)
        assert tokens(run(source, folder, skip_bad=True, **options)) == by_documents(tokenizer, ["one", "two"])


def test_a_missing_package_is_named_with_the_extra_that_brings_it(run, tmp_path, monkeypatch):
    compress(jsonl(tmp_path / "a.jsonl", TEXTS))
    parquet(tmp_path / "a.parquet", TEXTS)
    for module, source in (
        ("zstandard", tmp_path / "a.jsonl.zst"),
        ("pyarrow", tmp_path / "a.parquet"),
        ("datasets", "wikitext-103"),
    ):
        if module == "zstandard" and sys.version_info >= (3, 14):
            continue
        with monkeypatch.context() as without:
            for name in [name for name in sys.modules if name.partition(".")[0] == module]:
                without.delitem(sys.modules, name)
            without.setitem(sys.modules, module, None)
            with pytest.raises(InputError, match=rf"{module}.*pip install 'acgpt\[data\]'"):
                run(source, tmp_path / f"corpus-{module}")


# ---- bounded memory -------------------------------------------------------------------------------------------------


def test_only_a_few_batches_are_read_ahead():
    taken, used = 0, 0
    most = 0

    def items():
        nonlocal taken, most
        for number in range(-30, 0):
            taken += 1
            most = max(most, taken - used)
            yield number

    for result in in_order(abs, items(), workers=2):
        assert result == 30 - used
        used += 1
    assert used == 30
    assert most <= 6


@pytest.mark.parametrize(
    "name, convention", [("a.txt.gz", "lines"), ("a.txt.xz", "documents"), ("a.jsonl.gz", "documents")]
)
def test_reading_holds_a_few_batches_whatever_the_size(tmp_path, monkeypatch, name, convention):
    monkeypatch.setattr(corpus_rows, "BATCH", 1 << 17)
    monkeypatch.setattr(corpus_rows, "READ_COMPRESSED", 128)
    rows = (json.dumps({"text": f"{number} and {number * 7919} and {number**3}"}) + "\n" for number in range(100_000))
    raw = "".join(rows).encode()
    file = tmp_path / name
    file.write_bytes(gzip.compress(raw, 1) if name.endswith(".gz") else lzma.compress(raw, preset=0))
    (part,) = sources.resolve([str(file)], {})
    tracemalloc.start()
    read = sum(len(row) + ("jsonl" in name) for batch in part.batches(0, "text", convention) for row in batch.rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == len(raw)
    assert peak < 3 << 19 < len(raw) / 2  # a few batches


@pytest.mark.parametrize("name, convention", [("a.jsonl", "documents"), ("a.txt", "lines")])
def test_a_file_without_line_ends_does_not_fill_the_memory(tmp_path, monkeypatch, name, convention):
    monkeypatch.setattr(corpus_rows, "LONGEST", 1 << 17)
    (tmp_path / name).write_bytes(b"no end " * 500_000)
    (part,) = sources.resolve([str(tmp_path / name)], {})
    tracemalloc.start()
    ((bad,),) = [batch.rows for batch in part.batches(0, "text", convention)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bad.where == "line 1"
    assert peak < 1 << 20
