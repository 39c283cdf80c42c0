"""Interrupted preparations resume with the same bytes, and foreign files are never touched."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from disk import identity, watched_disk
from runs import Piped
from texts import GOOD, MANY, NUMBERS, TEXTS, by_documents, compress, everything, jsonl, parquet, tokens

from acgpt.common.files import write_atomically, write_json
from acgpt.data import prepare as corpus_prepare
from acgpt.data.corpus import Corpus
from acgpt.data.prepare import prepare
from acgpt.errors import InputError, OutputError

WRITES = {"os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"}


def in_a_fork(action):
    """Run an action in a fork of this process and return its exit code; a negative number is a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            action()
            os._exit(0)
        except (InputError, OutputError) as error:
            os.write(2, str(error).encode())
            os._exit(2 if isinstance(error, InputError) else 1)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_before(number):
    """Kill this process before its `number`-th change to the disk."""
    left, fsync = number, os.fsync

    def change(event, args):
        nonlocal left
        if event in WRITES or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def before_sync(descriptor):
        change("os.rename", ())
        fsync(descriptor)

    sys.addaudithook(change)
    os.fsync = before_sync


def complete_or_absent(folder):
    """Check that a manifest, if any, describes the files, and that every named shard is complete."""
    if (folder / "corpus.json").exists():
        Corpus.open(folder).verify()
    if (folder / "journal.json").exists():
        for split in json.loads((folder / "journal.json").read_text())["splits"].values():
            for shard in split["shards"]:
                assert sha256((folder / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]


@pytest.mark.parametrize("content", ["text", b"text", [b"te", b"xt"]])
def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch, content):
    disk, path = watched_disk(monkeypatch), tmp_path / "folder" / "file"
    write_atomically(path, content)
    assert path.read_text() == "text" and disk.renamed == [(path, [])]


@pytest.mark.parametrize("locked", [False, True])
def test_a_record_and_its_name_are_on_the_disk(tmp_path, monkeypatch, locked):
    disk = watched_disk(monkeypatch)
    write_json(tmp_path / "record.json", {"number": 1}, locked=locked)
    assert disk.renamed == [(tmp_path / "record.json", [])] and disk.lost(tmp_path) == []


@pytest.fixture(params=["rows", "pieces"])
def interrupted(request, tmp_path, small, monkeypatch, named):
    """A preparation with many features, its expected files, and a function that runs it in another folder."""
    monkeypatch.setattr(corpus_prepare, "CHECKPOINT", 2500)
    monkeypatch.setattr(corpus_prepare, "PIECE", 200)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    (tmp_path / "c.txt").write_bytes("\n".join(MANY).encode())
    jsonl_file, parquet_file = jsonl(tmp_path / "a.jsonl", MANY[:40]), parquet(tmp_path / "b.parquet", MANY)
    names = [compress(jsonl_file)[2], parquet_file, f"test={tmp_path}/c.txt"]
    if request.param == "pieces":
        (tmp_path / "d.txt").write_text("\n".join(NUMBERS[:100]))
        names = [tmp_path / "c.txt", compress(tmp_path / "d.txt")[1]]

    def run(folder, **options):
        options = {"validation": 0.3, "shard_bytes": 1024, "workers": 1, "tokenizer": named, "limit": 110, **options}
        return prepare(names, tmp_path / folder, **options)

    assert bool(run("whole").manifest["recipe"].get("piece")) == (request.param == "pieces")
    return run, everything(tmp_path / "whole")


def test_what_a_journal_or_a_manifest_names_is_on_the_disk(interrupted, tmp_path, monkeypatch):
    run, whole = interrupted
    folder, disk, journals = tmp_path / "again", watched_disk(monkeypatch), []

    def check(path):
        if path == folder / "journal.json":
            splits = json.loads((folder / "journal.json.tmp").read_text())["splits"]
            for split, state in splits.items():
                part = folder / f"{split}-{len(state['shards']):05}.bin.part"
                if unfinished := state["tokens"] - sum(shard["tokens"] for shard in state["shards"]):
                    assert disk.lost(part) == [] and part.stat().st_size == 2 * unfinished
            journals.append(splits)

    disk.before_rename = check
    run("again")
    assert everything(folder) == whole and sum(bool(splits) for splits in journals) > 2
    names = {name.partition("/")[0] for name in whole}
    assert {path.name for path, _ in disk.renamed} == {*names, "journal.json"}
    assert [lost for _, lost in disk.renamed if lost] == [] and names <= {*disk.synced[identity(folder)]}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_preparation_killed_at_any_moment_goes_on_to_the_same_bytes(interrupted, tmp_path):
    run, whole = interrupted
    assert sum(name.endswith(".bin") for name in whole) > 4
    number, ended = 0, 1
    while ended != 0:
        number += 5
        folder = f"killed-{number}"

        def work(number=number, folder=folder):
            kill_before(number)
            run(folder)

        ended = in_a_fork(work)
        assert ended in (0, -signal.SIGKILL), number
        complete_or_absent(tmp_path / folder)
        if ended and number % 2:  # killed twice
            assert in_a_fork(work) in (0, -signal.SIGKILL)
        run(folder)
        assert everything(tmp_path / folder) == whole, number
        shutil.rmtree(tmp_path / folder)
    assert number > 60, number


@pytest.mark.parametrize("interrupted", ["rows"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_replacing_a_corpus_can_be_killed_at_any_moment(interrupted, tmp_path):
    run, whole = interrupted
    for number in range(1, 40, 3):
        run("replaced", validation=0.0, seed=3, overwrite=True)

        def work(number=number):
            kill_before(number)
            run("replaced", overwrite=True)

        assert in_a_fork(work) == -signal.SIGKILL
        complete_or_absent(tmp_path / "replaced")
        begun = not (tmp_path / "replaced" / "corpus.json").exists()
        run("replaced", overwrite=not begun)
        assert everything(tmp_path / "replaced") == whole, number
    assert begun


@pytest.mark.parametrize("room", ["none for the tokenizer", "none for a shard"])
def test_a_full_disk_is_said_and_the_same_command_goes_on(run, named, tmp_path, monkeypatch, capfd, room):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    file = jsonl(tmp_path / "a.jsonl", NUMBERS * 5)
    run(file, tmp_path / "whole")
    limit = 3000 if room == "none for the tokenizer" else max(map(len, everything(Path(named)).values())) + 3000

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        run(file)

    assert in_a_fork(work) == 1
    output = capfd.readouterr().err
    assert f"cannot write {tmp_path / 'corpus'}" in output
    assert "File too large" in output and "Free some space" in output
    assert not (tmp_path / "corpus" / "corpus.json").exists()
    assert not list((tmp_path / "corpus").glob("*.bin"))
    run(file)
    assert everything(tmp_path / "corpus") == everything(tmp_path / "whole")


def test_a_preparation_that_fails_lets_go_of_its_files(run, tmp_path, monkeypatch):
    class Kept(corpus_prepare.Writer):
        def __post_init__(self):
            super().__post_init__()
            writers.append(self)

    writers: list[corpus_prepare.Writer] = []
    monkeypatch.setattr(corpus_prepare, "Writer", Kept)
    file = jsonl(tmp_path / "a.jsonl", NUMBERS)

    def stop(progress):
        if progress.tokens:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(file, watch=stop)
    assert [writer.file.closed for writer in writers if writer.file] == [True]


# The command, which kills itself in place of its second word in the journal of what it has read.
def die_in_the_middle(_):
    """Kill the process when it has noted the second batch or a later one, and is about to note another."""

    def kill(event, args):
        if event != "os.rename" or (journal := Path(args[1])).name != "journal.json" or not journal.exists():
            return
        if json.loads(journal.read_text())["position"][1]:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)


def test_a_command_killed_with_its_workers_goes_on_with_one_to_the_same_bytes(run, named, tmp_path):
    texts = [f"{number} " + TEXTS[0] * 80 for number in range(300)]
    file = jsonl(tmp_path / "a.jsonl", texts)  # some batches of the usual size
    options = ["--validation", "0.1", "--workers", "2", "--shard-size", "0.0625"]
    words = ["prepare", file, "-o", tmp_path / "killed", "-t", named, *options]
    with Piped(*words, before=die_in_the_middle) as command:
        output = command.stderr.read()  # until the last worker has ended, for they hold its end too
        assert command.wait() == -signal.SIGKILL, output
    row = json.loads((tmp_path / "killed" / "journal.json").read_text())["position"][1]
    assert 0 < row < len(texts) and not (tmp_path / "killed" / "corpus.json").exists()
    same, seen = {"validation": 0.1, "shard_bytes": 1 << 16}, []
    run(file, tmp_path / "killed", **same, watch=lambda progress: seen.append(progress.documents))
    assert next(documents for documents in seen if documents) > row  # it did go on
    run(file, tmp_path / "whole", **same)
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")


def test_a_finished_corpus_is_checked_and_left_as_it_is(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", MANY)
    run(file, shard_bytes=1024)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*")}
    phases = []
    moved = file.rename(tmp_path / "moved.jsonl")  # what counts is the content
    run(moved, shard_bytes=1024, watch=lambda progress: phases.append(progress.phase))
    assert phases[-1] == "reused"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*")} == times
    shard = tmp_path / "corpus" / "train-00001.bin"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-2] + b"\0\0")
    with pytest.raises(InputError, match=r"train-00001\.bin is damaged.*--overwrite"):
        run(moved, shard_bytes=1024)
    run(moved, shard_bytes=1024, overwrite=True)
    assert shard.read_bytes() == raw


def test_a_corpus_whose_tokenizer_was_changed_is_refused(run, named, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    run(file)
    other = run(file, tmp_path / "other", mask_token=True)
    shutil.rmtree(tmp_path / "corpus" / "tokenizer")
    with pytest.raises(InputError, match="cannot load the tokenizer in"):
        run(file)
    shutil.copytree(other.folder / "tokenizer", tmp_path / "corpus" / "tokenizer")
    with pytest.raises(InputError, match=r"corpus/tokenizer is not the tokenizer .*--overwrite"):
        run(file)


@pytest.mark.parametrize("name", ["corpus.json", "journal.json"])
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"recipe": {}}'])
def test_a_damaged_record_of_an_earlier_run_is_named(run, tmp_path, name, content):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_text(content)
    with pytest.raises(InputError, match=f"corpus/{name} is damaged"):
        run(jsonl(tmp_path / "a.jsonl", TEXTS))


def test_what_was_made_otherwise_is_refused_by_what_differs(run, tmp_path, monkeypatch):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    other = jsonl(tmp_path / "b.jsonl", TEXTS[:3])
    run(file)
    before = everything(tmp_path / "corpus")
    for names, options, difference in (
        (file, {"convention": "lines"}, r"convention \(was 'documents', now 'lines'\)"),
        (file, {"validation": 0.1}, r"validation \(was 0.0, now 0.1\)"),
        (file, {"seed": 1}, r"seed \(was 0, now 1\)"),
        (file, {"field": "id"}, "field"),
        (file, {"shard_bytes": 2048}, "shard_bytes"),
        (file, {"mask_token": True}, "tokenizer, mask_token"),
        (file, {"train_tokenizer": 300}, "other sources or settings. Differences: tokenizer"),
        (other, {}, "Differences: sources"),
        ([file, f"test={other}"], {}, "Differences: sources"),
        (f"test={file}", {}, "Differences: sources"),
    ):
        with pytest.raises(InputError, match=f"{difference}.*`overwrite=True`"):
            run(names, **options)
        assert everything(tmp_path / "corpus") == before
    corpus = run(other, convention="lines", overwrite=True)
    assert corpus.manifest["convention"] == "lines"


def test_what_a_failed_first_command_left_does_not_stand_in_the_way_of_its_correction(run, small, tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD * 50 + b'{"text": \n')
    with pytest.raises(InputError, match="line 51"):
        run(file)
    jsonl(file, TEXTS, field="body")  # mended, but of another field
    with pytest.raises(InputError, match="no field 'text'"):
        run(file, validation=0.1)
    (tmp_path / "corpus" / "thesis.tex").write_text("mine")
    assert tokens(run(file, field="body")) == by_documents(tokenizer, TEXTS)
    assert (tmp_path / "corpus" / "thesis.tex").read_text() == "mine"
    assert not (tmp_path / "corpus" / "journal.json").exists()


def test_unfinished_work_of_value_is_kept_and_the_ways_on_are_named(run, small, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", MANY)
    file.write_bytes(file.read_bytes() + b"{\n")
    with pytest.raises(InputError, match="`skip_bad=True`"):
        run(file, shard_bytes=1024)
    before = everything(tmp_path / "corpus")
    assert "train-00000.bin" in before
    with pytest.raises(
        InputError, match=r"unfinished corpus of another command\. Differences: seed .*\. Repeat.*`overwrite=True`"
    ):
        run(file, shard_bytes=1024, seed=1, skip_bad=True)
    assert everything(tmp_path / "corpus") == before
    run(file, shard_bytes=1024, seed=1, skip_bad=True, overwrite=True)


@pytest.mark.parametrize("text", ['{"text": "fine"}\n{', '{"text": " "}\n'], ids=["a bad row", "no text"])
@pytest.mark.parametrize("options", [{}, {"train_tokenizer": 300}], ids=["gpt2", "trained"])
@pytest.mark.filterwarnings("ignore:.*too small")
def test_an_input_error_leaves_nothing_that_was_not_there(run, tmp_path, text, options):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", tmp_path / "empty", tmp_path / "some" / "more" / "new"):
        with pytest.raises(InputError):
            run(file, folder, **options)
        assert {path.name for path in tmp_path.rglob("*")} == {"a.jsonl", "empty"}


def test_a_folder_with_other_files_is_refused_and_those_files_are_never_touched(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    folder = tmp_path / "corpus"
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("train-00000.bin", "thesis.tex", "tokenizer/mine"):
        (folder / name).write_text("mine")
    before = everything(folder)
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"contains other files \(thesis.tex, tokenizer, train-00000.bin\)"):
            run(file, overwrite=overwrite)
    assert everything(folder) == before
    shutil.rmtree(folder)
    run(file)
    (folder / "evaluation").mkdir()
    for name in ("thesis.tex", "evaluation/set", "train.bin"):
        (folder / name).write_text("mine")
    run(file, convention="lines", overwrite=True)
    assert [(folder / name).read_text() for name in ("thesis.tex", "evaluation/set", "train.bin")] == ["mine"] * 3


def test_two_processes_do_not_write_to_one_folder(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "corpus").mkdir()
    descriptor = os.open(tmp_path / "corpus", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another process is preparing"):
        run(file)
    os.close(descriptor)
    run(file)
