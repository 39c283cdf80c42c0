"""Write the tables of docs/benchmarks.md from the result files in benchmarks/results.

python benchmarks/render.py            rewrite what stands between <!-- table NAME --> and <!-- end -->
python benchmarks/render.py --check    only say whether the page is up to date (exit code 1 if not)
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [columns, rule, *rows])


def provenance(record: dict[str, Any]) -> str:
    """Where the figures come from."""
    versions = f"torch {record['torch']}, transformers {record['transformers']}"
    return f"`{record['command']}`, {record['hardware']}, {versions}, {record['date']}."


def decoding(record: dict[str, Any]) -> str:
    """Seconds, tokens a second and the ratio to `generate`."""
    rate, ratio = record["tokens_per_second"], record["over generate"]
    rows = [[name, f"{s:.2f}", f"{rate[name]:,.0f}", f"{ratio[name]:.2f}"] for name, s in record["seconds"].items()]
    share, bandwidth = record["bandwidth_share"], record["copy_bandwidth"] / 1e12
    note = f"Left to right uses {share:.0%} of the {bandwidth:.3g} TB/s that a large copy reaches on this machine."
    return markdown(["", "seconds", "tokens/s", "× generate"], rows) + "\n\n" + note


def scoring(record: dict[str, Any]) -> str:
    """Seconds, texts and tokens a second, and the ratio to one pass."""
    texts, tokens, ratio = record["texts_per_second"], record["asked_tokens_per_second"], record["over_one_pass"]
    rows = [
        [name, f"{s:.3f}", f"{texts[name]:,.1f}", f"{tokens[name]:,.0f}", f"{ratio[name]:.2f}"]
        for name, s in record["seconds"].items()
    ]
    return markdown(["", "seconds", "texts/s", "asked tokens/s", "× the time of one pass"], rows)


def bos(record: dict[str, Any]) -> str:
    """Perplexity by the token at position 0."""
    table = record["perplexity"]
    kinds = list(next(iter(table.values())))
    rows = [[f"`{token}`", *(f"{row[kind]:.2f}" for kind in kinds)] for token, row in table.items()]
    return markdown(["token at position 0", *(f"perplexity, {kind}" for kind in kinds)], rows)


def copies(record: dict[str, Any]) -> str:
    """Perplexity from the past alone and with copies."""
    rows = [[kind, *(f"{value:.2f}" for value in row.values())] for kind, row in record["perplexity"].items()]
    return markdown(["perplexity", "past only", "with copies"], rows)


def attention(record: dict[str, Any]) -> str:
    """Relative error of the logits, by architecture."""
    table = record["relative_error"]
    columns = list(next(iter(table.values())))
    rows = [[name, *(f"{row[column]:.2e}" for column in columns)] for name, row in table.items()]
    return markdown(["", *columns], rows)


TABLES = {"attention": attention, "decoding": decoding, "scoring": scoring, "bos": bos, "copies": copies}


def rendered(page: str) -> str:
    """The page with every table written anew."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        body = TABLES[record["benchmark"]](record)
        return f"<!-- table {name} -->\n{body}\n\n{provenance(record)}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, page, flags=re.DOTALL)


def main() -> None:
    before = PAGE.read_text(encoding="utf-8")
    after = rendered(before)
    if "--check" in sys.argv[1:]:
        sys.exit(before != after and f"{PAGE.name} is not what the result files say: run python benchmarks/render.py")
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
