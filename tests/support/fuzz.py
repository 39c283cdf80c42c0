"""How many examples the tests with random inputs try: few by default, many with ACGPT_TEST_FUZZ=10 (`make soak`)."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("ACGPT_TEST_FUZZ", "1"))


def examples(count: int) -> int:
    """The number of examples: `count`, or as many times that as the environment says."""
    return count * TIMES
