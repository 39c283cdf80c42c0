"""The paper's numbers, in `paper/*.json`, as rows of tables and entries of figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from acgpt.common.files import read_json_object
from acgpt.methods import METHODS
from acgpt.query.modes import MODES
from acgpt.report.entries import Entry
from acgpt.report.tables import Cell, Mean, Row, known_first

FOLDER = Path(__file__).parent / "paper"


@cache
def paper(name: str) -> dict[str, Any]:
    """Read the numbers of a section: "from_scratch", "finetuning" or "mauve"."""
    return read_json_object(FOLDER / f"{name}.json")


def sizes() -> dict[str, str]:
    """Return the paper's names of model sizes, in its order."""
    return dict(paper("from_scratch")["sizes"])


def size_title(size: str) -> str:
    """Return the paper's name of a model size, or the size itself."""
    return sizes().get(size, size)


def method_order(method: str) -> int:
    """Return the index of a method in the paper's tables; unknown methods come last."""
    return [*known_first(METHODS, paper("from_scratch")["methods"]), method].index(method)


def paper_rows(name: str, table: str, size: str, r_maxes: Collection[float], **more: Cell) -> list[Row]:
    """Return the rows of a size in one of the paper's tables, with `more` cells."""
    rows = []
    for row in paper(name)[table]:
        corpus, r_max = row["corpus"], row["r_max"]
        if row["model"] == size and r_max in r_maxes:
            cells: dict[str, Cell] = {"from": "paper", "r_max": r_max, "corpus": corpus, **more}
            cells |= {"method": METHODS[row["method"]].title, "seeds": paper(name)["seeds"].get(corpus)}
            rows.append(Row(cells | paper_modes(name, row), ("paper", corpus, r_max), paper=True))
    return rows


def paper_modes(name: str, row: Mapping[str, Any]) -> dict[str, Mean | None]:
    """Return a row of the paper as a `Mean` per mode."""
    digits = paper(name)["digits"][row["corpus"]]
    return {mode: Mean(row[mode][0], row[mode][1], digits=digits) if row[mode] else None for mode in MODES}


def paper_entries(**wanted: Any) -> list[Entry]:
    """Return the rows on training from scratch that have these values, as entries of figures."""
    rows = [row for row in paper("from_scratch")["perplexities"] if wanted.items() <= row.items()]
    return [
        Entry(METHODS[row["method"]].title, row["method"], row["r_max"], paper_modes("from_scratch", row))
        for row in rows
    ]
