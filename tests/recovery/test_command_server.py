"""Commands that are forked from a process that has done its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import until

import acgpt
from acgpt.cli import preloaded
from acgpt.experiments.command_server import SUPPORTED, CommandServer
from acgpt.experiments.runner import PROGRAM

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="commands are forked on Linux only")
ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | {"PYTHONPATH": str(ROOT / "src")}

# A server whose commands are lines of Python.
SERVER = """
import os, socket, sys, time, warnings
from acgpt.experiments.command_server import serve

state = [0]
words = serve(socket.socket(fileno=int(sys.argv[1])))
if words is None:
    os._exit(0)
exec(words[0])
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return sys.executable, str(script)


@pytest.fixture
def server(program: tuple[str, ...]) -> Iterator[CommandServer]:
    result = CommandServer(program, ENV)
    until(lambda: result.ready(0.1))
    yield result
    result.close()


def run(server: CommandServer, line: str, output: Path) -> tuple[int | None, str]:
    """Return the exit code and the output of a command."""
    with output.open("wb") as file:
        command = server.start([line], file.fileno())
    until(lambda: command.poll() is not None)
    return command.returncode, output.read_text()


def test_no_command_sees_what_an_earlier_one_has_changed(server, tmp_path):
    changes = "state.append(1); os.environ['CHANGED'] = '1'; os.chdir('/'); warnings.simplefilter('error')"
    shows = "print(state, 'CHANGED' in os.environ, os.getcwd(), warnings.filters)"
    before = run(server, shows, tmp_path / "before.txt")
    assert run(server, changes, tmp_path / "changes.txt") == (0, "")
    assert run(server, shows, tmp_path / "after.txt") == before
    assert before[1].startswith("[0] False ")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('error: no such split')", 1),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.kill(os.getpid(), 11)", -11),
    ],
)
def test_a_command_ends_with_the_code_of_a_process_of_its_own(server, tmp_path, line, code):
    alone = subprocess.run([sys.executable, "-c", f"import os, sys; {line}"], capture_output=True, text=True)
    assert alone.returncode == code
    ended, output = run(server, line, tmp_path / "said.txt")
    assert ended == code and output.splitlines()[-1:] == alone.stderr.splitlines()[-1:]
    assert run(server, "print('next')", tmp_path / "next.txt") == (0, "next\n")


def test_a_command_leads_a_process_group_without_a_terminal(server, tmp_path):
    line = "print(os.getpgrp() == os.getpid(), os.getpgrp() == os.getpgid(os.getppid()), sys.stdin.read() == '')"
    assert run(server, line, tmp_path / "said.txt") == (0, "True False True\n")


def test_sigterm_ends_a_command_and_comes_too_late_without_harm(server, tmp_path):
    began = tmp_path / "began"
    with (tmp_path / "said.txt").open("wb") as file:
        command = server.start([f"open({str(began)!r}, 'w'); time.sleep(120)"], file.fileno())
    until(began.exists)
    assert command.poll() is None
    command.terminate()
    until(lambda: command.poll() is not None)
    assert command.returncode == -signal.SIGTERM
    command.terminate()
    assert command.returncode == -signal.SIGTERM


def test_a_server_that_cannot_start_is_an_error_and_not_a_wait():
    server = CommandServer((sys.executable, "-c", "raise SystemExit(1)"), ENV)
    with pytest.raises(ConnectionError):
        until(lambda: server.ready(0.1))
    server.close()


def is_free(lock: Path) -> bool:
    import fcntl

    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_command_outlives_its_client_with_its_lock_and_the_server_does_not(program, tmp_path):
    lock, began, waits = tmp_path / "lock", tmp_path / "began", tmp_path / "waits"
    waits.touch()
    line = (
        f"open({str(began)!r}, 'w').write(f'{{os.getppid()}}\\n')\n"
        f"while os.path.exists({str(waits)!r}): time.sleep(0.01)"
    )
    client = (
        "import fcntl, os, time\n"
        "from acgpt.experiments.command_server import CommandServer\n"
        f"lock = os.open({str(lock)!r}, os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        f"server = CommandServer({program!r}, os.environ)\n"
        "while not server.ready(1): pass\n"
        f"command = server.start([{line!r}], os.open(os.devnull, os.O_WRONLY), lock)\n"
        "time.sleep(120)\n"
    )

    process = subprocess.Popen([sys.executable, "-c", client], env=ENV)
    until(lambda: began.exists() and began.read_text().endswith("\n"))
    process.kill()
    process.wait()
    assert not is_free(lock)
    waits.unlink()
    until(lambda: is_free(lock))
    parent = int(began.read_text())
    until(lambda: not Path(f"/proc/{parent}/cmdline").exists() or b"server.py" not in cmdline(parent))


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# ---- the server of acgpt --------------------------------------------------------------------------------------------


def light(tmp_path: Path, *lines: str) -> tuple[str, ...]:
    """The server of acgpt without its imports, which are left to the commands."""
    script = tmp_path / "light.py"
    before = ("from acgpt.cli import preloaded", "preloaded.import_commands = lambda: None")
    script.write_text("\n".join([*before, *lines, "preloaded.main()"]))
    return sys.executable, str(script)


def run_all(program: tuple[str, ...], commands: list[list[str]], output: Path) -> list[tuple[int | None, str]]:
    """Return the exit codes and the outputs of commands."""
    server, ended = CommandServer(program, ENV), []
    try:
        until(lambda: server.ready(0.1))
        for words in commands:
            with output.open("wb") as file:
                command = server.start(words, file.fileno())
            until(lambda command=command: command.poll() is not None)
            ended.append((command.returncode, output.read_text()))
    finally:
        server.close()
    return ended


def test_a_forked_command_is_the_command_acgpt(tmp_path):
    commands = [["--version"], ["train", "--list", "--json"], ["train", "no-such-recipe"]]
    alone = [
        subprocess.run([*PROGRAM, *words], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words in commands
    ]
    assert [each.returncode for each in alone] == [0, 0, 2]
    ended = run_all(light(tmp_path), commands, tmp_path / "said.txt")
    assert ended == [(each.returncode, each.stdout) for each in alone]


def test_a_command_that_a_fork_would_cut_off_from_the_gpu_is_started_anew(tmp_path):
    cuda = "SimpleNamespace(_is_in_bad_fork=lambda: True)"
    lines = ("import sys", "from types import SimpleNamespace", f"sys.modules['torch'] = SimpleNamespace(cuda={cuda})")
    lines += ("import acgpt.cli.main", "acgpt.cli.main.main = lambda: sys.exit('not started anew')")
    (ended,) = run_all(light(tmp_path, *lines), [["--version"]], tmp_path / "said.txt")
    assert ended == (0, f"acgpt {acgpt.__version__}\n")


def test_the_imports_are_there_before_the_first_command(monkeypatch):
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):  # which it sets, if they are not
        monkeypatch.setenv(name, "1")
    preloaded.import_commands()
    assert {
        "torch",
        "acgpt.training.train",
        "acgpt.evaluation.generate",
        "acgpt.evaluation.features",
        "acgpt.evaluation.text_metrics",
    } <= set(sys.modules)
