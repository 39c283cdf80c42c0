"""`python -m acgpt.cli.preloaded DESCRIPTOR`: run commands of `acgpt`, each in a fork made after the imports.

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
    """Serve the connection that the command line names; in a forked process, run its command as `acgpt` does."""
    import_commands()
    gc.freeze()  # the collector leaves what is imported alone, so that forked processes share its memory
    words = serve(socket.socket(fileno=int(sys.argv[1])))
    if words is None:
        os._exit(0)
    if (torch := sys.modules.get("torch")) and torch.cuda._is_in_bad_fork():
        # A library has used CUDA while it was imported, and a fork of that cannot: start anew.
        os.execv(sys.executable, [sys.executable, "-m", "acgpt", *words])
    spec = importlib.util.find_spec("acgpt.__main__")
    assert spec is not None and spec.origin is not None
    sys.argv = [spec.origin, *words]  # what `python -m acgpt` has; it is in the records of results
    from acgpt.cli.main import main as run

    run()


def import_commands() -> None:
    """Import what training, evaluation, generation and scoring use."""
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
