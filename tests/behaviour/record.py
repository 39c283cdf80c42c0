"""Compare how acgpt behaves with the record of it in `records/`.

A change of a record is a decision. Record it with `ACGPT_RECORD=1 pytest tests/behaviour`, read the diff, and name the
change in the commit.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORDS = Path(__file__).parent / "records"
SHOWN = 20  # differences
WIDTH = 160  # of a line of a record


def check(name: str, value: object, tolerance: float | None = None) -> None:
    """Compare a value with the record of that name, and fail with the differences.

    Args:
        name: The record is `records/NAME.json`.
        value: A JSON-able value. Tuples become lists; the order of keys does not matter.
        tolerance: Floats may differ by `tolerance × (1 + |recorded|)`. Everything else is compared exactly.
    """
    __tracebackhide__ = True
    path = RECORDS / f"{name}.json"
    now = json.loads(json.dumps(value))
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    changes = ["there is no such record"] if recorded is None else list(differences(recorded, now, tolerance))
    if not changes:
        return
    if os.environ.get("ACGPT_RECORD") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(laid_out(now) + "\n", encoding="utf-8")
        return
    more = [f"and {len(changes) - SHOWN} more differences"] if len(changes) > SHOWN else []
    advice = "If the change is meant, record it with ACGPT_RECORD=1 and name it in the commit."
    pytest.fail("\n".join([f"{path.name} differs:", *changes[:SHOWN], *more, advice]), pytrace=False)


def differences(recorded: object, now: object, tolerance: float | None = None, where: str = "") -> Iterator[str]:
    """Yield a line for each difference between two JSON values."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        for key in recorded | now:
            inner = f"{where} › {key}" if where else key
            if key not in now:
                yield f"{inner}: is gone, was {short(recorded[key])}"
            elif key not in recorded:
                yield f"{inner}: is new, {short(now[key])}"
            else:
                yield from differences(recorded[key], now[key], tolerance, inner)
    elif isinstance(recorded, list) and isinstance(now, list) and all(isinstance(x, str) for x in recorded + now):
        if recorded != now:
            yield f"{where}:\n" + lines_that_differ(recorded, now)
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        for i, (one, other) in enumerate(zip(recorded, now, strict=True)):
            yield from differences(one, other, tolerance, f"{where}[{i}]")
    elif isinstance(recorded, str) and isinstance(now, str):
        if recorded != now:
            yield f"{where}:\n" + lines_that_differ(recorded.splitlines(), now.splitlines())
    elif not same(recorded, now, tolerance):
        yield f"{where}: was {short(recorded)}, is {short(now)}"


def laid_out(value: object, indent: str = "") -> str:
    """Return a JSON value as text, with what fits into a line on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [
            f"{inner}{json.dumps(key, ensure_ascii=False)}: {laid_out(item, inner)}" for key, item in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + laid_out(item, inner) for item in value) + f"\n{indent}]"


def same(recorded: object, now: object, tolerance: float | None) -> bool:
    """Return whether two values that are not containers of the same kind agree."""
    if isinstance(recorded, bool) or isinstance(now, bool):
        return recorded is now
    if isinstance(recorded, int | float) and isinstance(now, int | float):
        if isinstance(recorded, int) and isinstance(now, int):
            return recorded == now
        if math.isnan(recorded) or math.isnan(now):
            return math.isnan(recorded) and math.isnan(now)
        if recorded == now or tolerance is None or math.isinf(recorded):
            return recorded == now
        return abs(now - recorded) <= tolerance * (1 + abs(recorded))
    return recorded == now


def lines_that_differ(recorded: list[str], now: list[str]) -> str:
    """Return the lines of a difference, without those that are in both."""
    lines = [line.rstrip() for line in difflib.ndiff(recorded, now) if line[0] in "+-?"]
    return "\n".join(lines) or "  the ends of lines"


def short(value: object) -> str:
    """Return a value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]} …"
