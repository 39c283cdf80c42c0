"""Snippets of README.md and docs/: extract them, run them in the test process, or check them without running."""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from acgpt.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {"python", "sh", "console"}  # what is run
OTHERS = {"", "text", "yaml", "toml", "tex", "json"}  # what is not
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "assets" not in path.parts
}


@dataclass(frozen=True)
class Snippet:
    """A block of code in a page.

    Args:
        page: Its path from the root of the repository.
        line: The line of its first fence.
        language: As the fence names it.
        code: What stands between the fences.
        reason: Why it is not run; "" if it is.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str


def snippets(page: str) -> list[Snippet]:
    """Return the code blocks of a page, in order."""
    text = PAGES[page].read_text(encoding="utf-8")
    results = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        results.append(Snippet(page, line, match["language"], match["code"], match["reason"] or ""))
    return results


def runnable(page: str) -> list[Snippet]:
    """Return the snippets of a page that are run."""
    return [each for each in snippets(page) if each.language in LANGUAGES and not each.reason]


# ---- running --------------------------------------------------------------------------------------------------------


def run_page(page: str) -> None:
    """Run the snippets of a page one after the other in the working directory; Python shares one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for each in runnable(page):
        if each.language == "python":
            run_python(each, names)
        elif each.language == "sh":
            for line in commands(each.code):
                assert_succeeds(each, line)
        else:
            run_console(each)


def run_python(snippet: Snippet, names: dict[str, Any]) -> None:
    """Run plain code, or a doctest."""
    location = f"{snippet.page}:{snippet.line}"
    if ">>>" not in snippet.code:
        exec(compile(snippet.code, location, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(snippet.code, names, location, location, 0)
    printed: list[str] = []
    test.globs = names
    results = doctest.DocTestRunner(verbose=False).run(test, out=printed.append, clear_globs=False)
    assert results.attempted > 0 and results.failed == 0, "".join(printed)


def run_console(snippet: Snippet) -> None:
    """Run each line that begins with a prompt, and compare what it prints with the lines after it."""
    for part in re.split(r"^\$ ", snippet.code, flags=re.M)[1:]:
        line, _, expected = part.partition("\n")
        printed = assert_succeeds(snippet, line)
        assert trimmed(printed) == trimmed(expected), f"{snippet.page}:{snippet.line}: {line} prints\n{printed}"


def trimmed(text: str) -> str:
    """Strip empty lines at both ends, and spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def assert_succeeds(snippet: Snippet, line: str) -> str:
    """Run one command line, `acgpt` in this process, and return what it printed."""
    words = shlex.split(line, comments=True)
    if words[:1] != ["acgpt"]:
        return subprocess.run(["bash", "-ec", line], check=True, capture_output=True, text=True).stdout
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[-1]
    result = CliRunner().invoke(app, words[1:], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0, f"{snippet.page}:{snippet.line}: {line}\n{result.output}"
    if target is not None:
        Path(target).write_text(result.stdout, encoding="utf-8")
    return result.stdout


def commands(code: str) -> list[str]:
    """Return the command lines of a block, without comments, with continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", code)
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make a folder the working directory inside the context."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# ---- checking what is not run ---------------------------------------------------------------------------------------


def called(code: str) -> Iterator[list[str]]:
    """Return the arguments of each call of `acgpt` in a block."""
    for line in commands(code.replace("$ acgpt", "acgpt")):
        for part in re.split(r"\|\||;|\|(?=\s*parallel)| &$|\bdo\b|>", line):
            if match := re.search(r"(?:^|\s)acgpt\s+(.+)", re.sub(r"\s#\s.*", "", part)):
                yield shlex.split(match[1], comments=True)


def mistakes(words: list[str]) -> list[str]:
    """Return the arguments of a call of `acgpt` that are no known command or option."""
    command: Any = typer.main.get_command(app)
    words = list(words)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if getattr(command, "commands", None) and not words[:1][0].startswith("-"):
        return [words[0]]
    known = {"-h", "--help"} | {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [option for option in given if option not in known]
