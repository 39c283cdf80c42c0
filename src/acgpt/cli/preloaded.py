"""`python -m acgpt.cli.preloaded DESCRIPTOR`: run `acgpt` commands in forks of a process that has done the imports.

`acgpt.experiments.command_server` describes the server and its client.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import socket
import sys

from acgpt.cli.ui import silence_libraries
from acgpt.experiments.command_server import serve


def main() -> None:
    """Serve the connection given as a file descriptor; in a forked process, run a command as `acgpt` does."""
    import_commands()
    gc.freeze()  # keeps the collector from touching imported objects, so that forks share their memory
    words = serve(socket.socket(fileno=int(sys.argv[1])))
    if words is None:
        os._exit(0)
    if (torch := sys.modules.get("torch")) and torch.cuda._is_in_bad_fork():
        # A library initialised CUDA on import, so CUDA does not work in a fork: start a new process.
        os.execv(sys.executable, [sys.executable, "-m", "acgpt", *words])
    spec = importlib.util.find_spec("acgpt.__main__")
    assert spec is not None and spec.origin is not None
    sys.argv = [spec.origin, *words]  # as for `python -m acgpt`; the command is saved with results
    from acgpt.cli.main import main as run

    run()


def import_commands() -> None:
    """Import the modules of training, evaluation, generation and scoring."""
    silence_libraries()  # first: libraries read these settings when they are imported
    import acgpt.cli.main
    import acgpt.display.show
    import acgpt.evaluation.evaluate
    import acgpt.evaluation.features
    import acgpt.evaluation.generate
    import acgpt.evaluation.text_metrics
    import acgpt.models.loading
    import acgpt.training.train  # noqa: F401

    with contextlib.suppress(ImportError):
        import matplotlib.pyplot  # noqa: F401


if __name__ == "__main__":
    main()
