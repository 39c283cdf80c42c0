"""Make tasks for infilling: gaps at character borders whose true text is known, in prose and in code.

    python default-model/detokenise.py wiki.valid.tokens > valid.jsonl
    python default-model/infilling_tasks.py --prose valid.jsonl --code FOLDER… --count 300 -o dev.jsonl
    python default-model/infilling_tasks.py --prose test.jsonl --count 400 -o prose.jsonl
    python default-model/infilling_tasks.py --humaneval HumanEval-SingleLineInfilling.jsonl.gz -o humaneval.jsonl

A task is a line of JSON: prefix, fill and suffix, and for HumanEval the tests that a filled-in function must pass. The
same files, count and seed give the same tasks. Gaps in prose never begin or end with a space, so most prefixes end with
one. Lines of code have their indentation and newline.

| kind | gap |
|---|---|
| word | a word, without punctuation: "well-known", "don't" and "1,000" are one word |
| phrase | 2 to 6 words of a sentence, with the punctuation between them |
| sentence | from the first character to the full stop, with quotation marks and brackets that close after it |
| line | a whole line of a function, as in HumanEval |
| humaneval | a line of a solution of HumanEval (Bavarian et al. 2022, https://arxiv.org/abs/2207.14255) |
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import itertools
import json
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from acgpt.errors import InputError

CONTEXT = (400, 800)  # characters of prose on each side: least and most
PHRASE = (2, 6)  # words: least and most
SENTENCE = (4, 50)
FUNCTION = (5, 40)  # lines
FEWEST_LINES = 3  # of a function that could be a gap, because a shorter body is seldom more than a return
LINES_BEFORE = 15  # lines of the file before a function's def, at most
LONGEST_LINE = 200  # characters
PROSE_KINDS = ("word", "phrase", "sentence")

WORD = re.compile(r"\w+(?:[-'’]\w+|[.,]\d+)*")
SENTENCE_END = re.compile(r"(\S*?)[.!?][\"'”’)\]]*(?= [\"'“‘(\[]?[A-Z0-9]|$)")
ABBREVIATIONS = {"Mr", "Mrs", "Ms", "Dr", "Prof", "St", "Mt", "Ft", "Gen", "Col", "Maj", "Capt", "Lt", "Sgt", "Gov"}
ABBREVIATIONS |= {"Rev", "Hon", "Sen", "Rep", "Jr", "Sr", "No", "Nos", "Vol", "pp", "vs", "v", "c", "ca", "cf", "al"}
ABBREVIATIONS |= {"Jan", "Feb", "Mar", "Apr", "Aug", "Sept", "Oct", "Nov", "Dec", "Op", "op", "Co", "Inc", "approx"}
PLACEHOLDER = re.compile("<unk>|<formula>")  # of WikiText

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Task:
    """A gap and the text around it.

    Attributes:
        name: Where the gap comes from; unique in a file of tasks.
        kind: The kind of gap, from the table above.
        prefix: The text before the gap.
        fill: The true text of the gap.
        suffix: The text after the gap.
        test: Code that defines `check(candidate)`; empty if there are no tests.
        entry_point: The name of the function to check.
    """

    name: str
    kind: str
    prefix: str
    fill: str
    suffix: str
    test: str = ""
    entry_point: str = ""

    def program(self, fill: str) -> str:
        """Return the function with this fill, its tests, and the call that runs them."""
        return f"{self.prefix}{fill}{self.suffix}\n{self.test}\ncheck({self.entry_point})\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prose", type=Path, nargs="+", default=[], metavar="JSONL", help='lines of {"text": …}')
    parser.add_argument("--code", type=Path, nargs="+", default=[], metavar="PATH", help="Python files, or folders")
    parser.add_argument("--humaneval", type=Path, metavar="JSONL.GZ", help="HumanEval's infilling tasks: all are taken")
    parser.add_argument("--count", type=int, default=300, help="number of gaps, half of them in code if both are given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    if not (args.prose or args.code or args.humaneval):
        parser.error("Nothing to make tasks from. Name --prose, --code or --humaneval.")
    tasks = []
    in_code = 0 if not args.code else args.count // 2 if args.prose else args.count
    try:
        if args.prose:
            tasks += prose_gaps(read_texts(args.prose), args.count - in_code, args.seed)
        if args.code:
            tasks += code_gaps(args.code, in_code, args.seed)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    if args.humaneval:
        tasks += humaneval(args.humaneval)
    write_tasks(args.output, tasks)
    for kind, group in by_kind(tasks).items():
        print(f"{kind}: {len(group)} gaps, median {statistics.median(len(task.fill) for task in group):.0f} characters")
    print(json.dumps({"seed": args.seed, "sha256": hashlib.sha256(args.output.read_bytes()).hexdigest()}))


# ---- files ----------------------------------------------------------------------------------------------------------


def read_tasks(path: Path) -> list[Task]:
    """Return the tasks that `write_tasks` wrote.

    Raises:
        InputError: A line is no task, or there is none.
    """
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        try:
            if line:
                tasks.append(Task(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}, line {number}, is no task of infilling_tasks.py: {error}") from error
    if not tasks:
        raise InputError(f"{path} has no tasks.")
    return tasks


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """Write one line of JSON for each task."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(asdict(task), ensure_ascii=False) + "\n" for task in tasks)


def read_texts(paths: Iterable[Path]) -> list[str]:
    """Return the texts of files with lines of {"text": …}."""
    return [json.loads(line)["text"] for path in paths for line in path.open(encoding="utf-8")]


def by_kind(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Return the tasks of each kind."""
    groups = defaultdict(list)
    for task in tasks:
        groups[task.kind].append(task)
    return dict(groups)


def humaneval(path: Path) -> list[Task]:
    """Return the tasks of a file of HumanEval infilling, which may be compressed by gzip."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode()
    return [
        Task(
            name=row["task_id"],
            kind="humaneval",
            prefix=row["prompt"],
            fill=row["canonical_solution"],
            suffix=row["suffix"],
            test=row["test"],
            entry_point=row["entry_point"],
        )
        for row in map(json.loads, filter(None, text.split("\n")))
    ]


# ---- prose ----------------------------------------------------------------------------------------------------------


def prose_gaps(texts: Sequence[str], count: int, seed: int) -> list[Task]:
    """Return gaps in prose: words, phrases and sentences in turn, a third of each.

    Gaps lie in sentences drawn without replacement. Each gap has 400 to 800 characters on both sides, which begin and
    end at word borders and may cross paragraphs. No two tasks share text, and none has a placeholder (<unk>,
    <formula>). Lines without a sentence, like headings, have no gaps.

    Args:
        texts: Plain texts, such as those of default-model/detokenise.py.
        count: The number of gaps.
        seed: Determines sentences, gaps and contexts.

    Raises:
        ValueError: The texts have too few sentences with enough text around them.
    """
    rng = random.Random(seed)
    candidates = [(i, *span) for i, text in enumerate(texts) for span in sentences(text)]
    rng.shuffle(candidates)
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    tasks: list[Task] = []
    for i, first, last in candidates:
        if len(tasks) == count:
            break
        text, kind = texts[i], PROSE_KINDS[len(tasks) % len(PROSE_KINDS)]
        gap = choose_gap(text, first, last, kind, rng)
        window = gap and choose_window(text, *gap, rng)
        if not gap or not window or PLACEHOLDER.search(text, *window):
            continue
        if any(window[0] < end and start < window[1] for start, end in taken[i]):
            continue
        taken[i].append(window)
        parts = text[window[0] : gap[0]], text[slice(*gap)], text[gap[1] : window[1]]
        tasks.append(Task(f"{kind}/{i}/{gap[0]}", kind, *parts))
    if len(tasks) < count:
        raise ValueError(f"The texts have room for only {len(tasks)} of {count} gaps: lower the count or add texts.")
    return tasks


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """Yield the first and last border of each sentence. A sentence ends with a full stop, ! or ?, within a line.

    Abbreviations and initials do not end a sentence, nor does a full stop before a word in lower case.
    """
    for line in re.finditer(r"[^\n]+", text):
        start = line.start()
        for end in SENTENCE_END.finditer(line[0]):
            word = end[1].lstrip("\"'“‘([")
            initials = re.search(r"[^\W\d]\.", word) or (len(word) == 1 and word.isalpha())
            if (word in ABBREVIATIONS or initials) and end.end() < len(line[0]):
                continue
            while text[start].isspace():
                start += 1
            yield start, line.start() + end.end()
            start = line.start() + end.end()


def choose_gap(text: str, first: int, last: int, kind: str, rng: random.Random) -> tuple[int, int] | None:
    """Return the borders of a gap of a kind in a sentence, or None if the sentence is too short or too long."""
    words = [match.span() for match in WORD.finditer(text, first, last)]
    if not SENTENCE[0] <= len(words) <= SENTENCE[1]:
        return None
    if kind == "sentence":
        return first, last
    length = 1 if kind == "word" else rng.randint(PHRASE[0], min(PHRASE[1], len(words) - 1))
    start = rng.randrange(len(words) - length + 1)
    return words[start][0], words[start + length - 1][1]


def choose_window(text: str, first: int, last: int, rng: random.Random) -> tuple[int, int] | None:
    """Return borders of words that leave 400 to 800 characters on both sides of a gap, or None if there are none."""
    least, most = CONTEXT
    starts = [p for p in range(max(first - most, 0), first - least + 1) if starts_word(text, p)]
    ends = [p for p in range(last + least, min(last + most, len(text)) + 1) if ends_word(text, p)]
    return (rng.choice(starts), rng.choice(ends)) if starts and ends else None


def starts_word(text: str, border: int) -> bool:
    """Return whether the character after a border is no space, and the one before it is a space or missing."""
    return not text[border].isspace() and (border == 0 or text[border - 1].isspace())


def ends_word(text: str, border: int) -> bool:
    """Return whether the character before a border is no space, and the one after it is a space or missing."""
    return not text[border - 1].isspace() and (border == len(text) or text[border].isspace())


# ---- code -----------------------------------------------------------------------------------------------------------


def code_gaps(paths: Iterable[Path], count: int, seed: int, kind: str = "line") -> list[Task]:
    """Return single lines of Python functions, with indentation and newline, at most one of each outer function.

    Functions have 5 to 40 lines, at least 3 of which could be a gap. The prefix begins up to 15 lines before the
    function's def; the suffix ends with the function. Gaps are not blank, a comment, a docstring, part of the def or of
    a string of several lines, or longer than 200 characters.

    Args:
        paths: Python files, and folders that are searched for them, tests left out. They take turns, so that a large
            folder does not crowd out the others. Files that do not parse are skipped.
        count: The number of gaps.
        seed: Determines functions and lines.
        kind: The `kind` of the tasks.

    Raises:
        ValueError: The files have too few functions.
    """
    rng = random.Random(seed)
    groups = []
    for path in paths:
        group = list(functions(path, kind))
        rng.shuffle(group)
        groups.append(group)
    turns = (tasks for turn in itertools.zip_longest(*groups) for tasks in turn if tasks)
    chosen = {task.name: task for task in map(rng.choice, itertools.islice(turns, count))}
    if len(chosen) < count:
        raise ValueError(f"The files have only {len(chosen)} of {count} functions: lower the count or add files.")
    return list(chosen.values())


def functions(path: Path, kind: str) -> Iterator[list[Task]]:
    """Yield the possible tasks of each function of a file, or of all Python files of a folder but its tests."""
    files = [file for file in sorted(path.rglob("*.py")) if not is_test(file.relative_to(path))]
    for file in files if path.is_dir() else [path]:
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = [line + "\n" for line in source.split("\n")]
        name = file.relative_to(path.parent).as_posix()
        for function in outer_functions(tree):
            end = function.end_lineno or function.lineno
            if not FUNCTION[0] <= end - function.lineno + 1 <= FUNCTION[1]:
                continue
            start = max(function.lineno - 1 - LINES_BEFORE, 0)
            tasks = [
                Task(f"{name}:{i + 1}", kind, "".join(lines[start:i]), lines[i], "".join(lines[i + 1 : end]))
                for i in body_lines(function)
                if is_code(lines[i])
            ]
            if len(tasks) >= FEWEST_LINES:
                yield tasks


def is_test(path: Path) -> bool:
    """Return whether a file is named as a test or in a folder of tests, which are more repetitive than other code."""
    return path.name.startswith(("test_", "conftest")) or bool({"test", "tests", "testing"} & set(path.parts))


def outer_functions(tree: ast.AST) -> Iterator[Function]:
    """Yield the functions and methods that are not within another function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node
        else:
            yield from outer_functions(node)


def is_code(line: str) -> bool:
    """Return whether a line is short enough, and neither blank nor a comment."""
    return bool(line.strip()) and not line.lstrip().startswith("#") and len(line) <= LONGEST_LINE


def body_lines(function: Function) -> list[int]:
    """Return the indices of the lines of a function's body, without docstrings and strings of several lines."""
    inside: set[int] = set()
    strings: set[int] = set()
    for statement in function.body:
        inside |= line_range(statement)
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings |= line_range(node)
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            strings |= line_range(node) if len(line_range(node)) > 1 else set()
    signature = function.lineno - 1
    return sorted(inside - strings - {signature})


def line_range(node: ast.stmt | ast.expr) -> set[int]:
    """Return the indices of the lines of a node."""
    return set(range(node.lineno - 1, node.end_lineno or node.lineno))


if __name__ == "__main__":
    main()
