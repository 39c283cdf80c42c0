"""Provenance of a result: versions, date and command."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from typing import Any

from acgpt.version import __version__


def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on, importing them on demand."""
    import accelerate
    import numpy as np
    import torch
    import transformers

    return {
        "acgpt": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def date_and_command() -> dict[str, Any]:
    """Return the date and the command."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": ["acgpt", *sys.argv[1:]]}
