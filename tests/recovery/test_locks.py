"""Locks of files and folders; on Windows they are on a file beside, which is tested everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from acgpt.common import files
from acgpt.common.files import locked

HOLDER = """
import sys, time
from pathlib import Path
from acgpt.common import files
files.LOCK_BESIDE = sys.argv[2] == "True"
with files.locked(Path(sys.argv[1])) as lock:
    print(lock is not None, flush=True)
    time.sleep(120)
"""


@pytest.fixture(params=[False, True], ids=["itself", "beside"])
def beside(request, monkeypatch):
    monkeypatch.setattr(files, "LOCK_BESIDE", request.param)
    return request.param


@pytest.fixture(params=["file", "folder"])
def path(request, tmp_path):
    path = tmp_path / "holds" / request.param
    path.mkdir(parents=True) if request.param == "folder" else path.parent.mkdir()
    return path


def test_one_process_at_a_time_has_a_lock_and_a_killed_one_gives_it_back(path, beside):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path), str(beside)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "True\n"
        with locked(path) as lock:
            assert lock is None
    finally:
        holder.kill()
        holder.communicate()
    with locked(path) as lock:
        assert lock is not None


def test_a_lock_has_one_owner_within_a_process_and_ends_with_its_context(path, beside):
    for _ in range(2):
        with locked(path) as first, locked(path, patience=0.15) as second:
            assert first is not None and second is None


def test_a_lock_adds_nothing_to_a_folder_that_it_locks(path, beside):
    with locked(path), locked(path):
        pass
    names = sorted(str(each.relative_to(path.parent)) for each in path.parent.rglob("*"))
    if path.name == "folder":
        assert names == ([".folder.lock"] if beside else []) + ["folder"]
    else:
        assert names == [".file.lock" if beside else "file"]


def test_a_folder_is_locked_by_any_of_its_names(tmp_path, beside, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path.parent / f"{tmp_path.name}-link").symlink_to(tmp_path)
    for name in (".", tmp_path, tmp_path.parent / f"{tmp_path.name}-link"):
        with locked(tmp_path) as first, locked(Path(name)) as second:
            assert first is not None and second is None
