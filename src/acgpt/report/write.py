"""Write a report as a folder: built in memory, written to a temporary folder, then renamed.

    REPORT/
      report.html       all tables and figures on one self-contained page, which also works offline
      report.json       the same for programs
      samples.html      samples side by side, if there are generations
      PART/…            each table as .md, .csv and .tex, each figure as .png and .svg

The same runs give the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from acgpt.common.files import disk_errors, finite, json_text
from acgpt.errors import InputError
from acgpt.evaluation.generations import record_of
from acgpt.report import finetuning, from_scratch, generation
from acgpt.report.page import template
from acgpt.report.part import Part
from acgpt.report.pictures import render_figure
from acgpt.report.runs import Run, find_runs, measurements, read_runs
from acgpt.report.scores import ENDING
from acgpt.training.run_folder import CONFIG, RESULTS, commit
from acgpt.version import __version__

PARTS = (from_scratch.make, finetuning.make)  # each takes the runs, and returns None if it has nothing to show
PAGE, DATA = "report.html", "report.json"
NO_PICTURES = "no figures: matplotlib is missing. Run pip install 'acgpt[plot]'."


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """A comparison of runs.

    Args:
        parts: The parts of the report.
        runs: The runs that it compares.
        notes: Further remarks for the reader.
        files: Files that were written, as paths in the report's folder.
    """

    parts: list[Part]
    runs: list[Run]
    notes: list[str]
    files: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Report(runs={len(self.runs)}, tables={list(self.tables)})"

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Every table as a DataFrame, by the path of its file without extension: "from-scratch/test/small".

        They have the contents of the CSV files. `source` is "run", or "paper" for the paper's rows. A mean over seeds
        is followed by its deviation and whether it is a bound (`training`, `training_std`, `training_bound`).
        """
        return {f"{part.name}/{stem}": table.frame for part in self.parts for stem, table in part.tables.items()}

    @cached_property
    def measurements(self) -> pd.DataFrame:
        """Every perplexity that was read, one row per run, evaluation dataset and mode; see `runs.measurements`."""
        return measurements(self.runs)

    @cached_property
    def content(self) -> dict[str, Any]:
        """Contents of `report.json`."""
        return {
            "acgpt": __version__,
            **{part.name: part.content for part in self.parts},
            "runs": [run_record(run) for run in self.runs],
            "notes": self.notes,
            "files": list(self.files),
        }


def make_report(folders: Sequence[str | Path], output: str | Path | None = None) -> Report:
    """Compare runs, and write tables and figures into a folder, all or nothing; see `compare.compare`.

    In folders of runs, unfinished ones are skipped. Generations and their scores are found in all folders.
    """
    if output is not None:
        output = Path(output).resolve()
        check_output(output)
    paths = [Path(folder) for folder in folders]
    run_folders, unfinished = find_runs([path for path in paths if not only_generations(path)])
    runs = read_runs(run_folders)
    parts = [part for make in PARTS if (part := make(runs)) is not None]
    if (generation_part := generation.make(paths, runs)) is not None:
        parts.append(generation_part)
    notes = [f"{folder} is not finished: left out." for folder in unfinished]
    notes += [note for run in runs for note in run.notes]
    notes += [note for part in parts for note in part.notes]
    report = Report(parts, runs, notes)
    return report if output is None else write_report(report, output)


def write_report(report: Report, output: Path) -> Report:
    """Write all forms of a report into a folder.

    Returns:
        The report with its files, and a note if figures could not be drawn.
    """
    parts, notes = report.parts, list(report.notes)
    files: dict[str, bytes] = {}
    for part in parts:
        files |= table_files(part) | {name: make().encode() for name, (_, make) in part.pages.items()}
    drawings = {f"{part.name}/{stem}": draw for part in parts for stem, (draw, _) in part.pictures.items()}
    if find_spec("matplotlib") is not None:
        for path, draw in drawings.items():
            files |= {f"{path}.{extension}": content for extension, content in render_figure(draw).items()}
    elif drawings:
        notes.append(NO_PICTURES)
    page = template("report.html").render(parts=parts, runs=report.runs, notes=notes, files=files, version=__version__)
    files[PAGE] = page.encode()
    report = replace(report, notes=notes, files=tuple(sorted([*files, DATA])))
    files[DATA] = json_text(finite(report.content), indent=1, allow_nan=False).encode()
    write_files(files, output)
    return report


def only_generations(folder: Path) -> bool:
    """Return whether a folder has generations, or scores of them, but no run."""
    runs = (folder / CONFIG).exists() or (folder / RESULTS).exists() or any(folder.glob(f"*/{CONFIG}"))
    return not runs and (any(map(record_of, folder.rglob("*.jsonl"))) or any(folder.rglob(f"*{ENDING}")))


def check_output(output: Path) -> None:
    """Raise `InputError` if a folder has contents other than an earlier report."""
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"{output} is a file: name a folder with `output`.")
    earlier: set[str] = set()
    if (output / DATA).is_file():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # then it is not a report
            earlier = set(json.loads((output / DATA).read_text(encoding="utf-8"))["files"])
    for path in sorted(output.rglob("*")):
        if not path.is_dir() and path.relative_to(output).as_posix() not in earlier:
            raise InputError(
                f"{output} contains {path.name}, which is not part of a report: name another folder with `output`."
            )


def table_files(part: Part) -> dict[str, bytes]:
    """Return the tables of a part as files."""
    files: dict[str, str] = {}
    for stem, table in part.tables.items():
        path, label = f"{part.name}/{stem}", f"tab:{part.name}-{stem.replace('/', '-')}"
        csv = table.cells.to_csv(index=False, lineterminator="\n")
        files |= {f"{path}.md": table.markdown(), f"{path}.csv": csv, f"{path}.tex": table.latex(label)}
    return {path: text.encode() for path, text in files.items()}


def run_record(run: Run) -> dict[str, Any]:
    """Describe a run for programs: what was trained, and its evaluations as they were written."""
    keys = ("steps", "texts", "tokens", "seconds", "hardware", "versions", "command", "corpus_hash", "recipe")
    evaluations = [
        {"split": evaluation.split, **{key: evaluation.content.get(key) for key in ("set", "modes", "gains")}}
        for evaluation in run.evaluations
    ]
    return {"name": run.name, **{key: run.results.get(key) for key in keys}, "evaluations": evaluations}


def write_files(files: Mapping[str, bytes], output: Path) -> None:
    """Write these files as a folder, all of them or none, then replace what was there before."""
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with disk_errors(output):
            for name, content in files.items():
                path = partial / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            commit(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
