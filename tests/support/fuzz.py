"""Number of examples in tests with random inputs: few by default, more with ACGPT_TEST_FUZZ=10 (`make soak`)."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("ACGPT_TEST_FUZZ", "1"))


def examples(count: int) -> int:
    """Return the number of examples: `count`, times ACGPT_TEST_FUZZ if it is set."""
    return count * TIMES
