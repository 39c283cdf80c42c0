"""What a result was computed with, when and by which command, for its record."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from typing import Any

from acgpt.version import __version__


def versions() -> dict[str, str]:
    """All that a number may depend on; the libraries are imported when it is asked."""
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


def when() -> dict[str, Any]:
    """The date and the command."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": ["acgpt", *sys.argv[1:]]}
