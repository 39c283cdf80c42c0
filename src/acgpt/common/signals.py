"""Handlers of signals."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], object], *names: str) -> Iterator[None]:
    """Handle signals inside the context, if this is the main thread; Python handles none in others.

    A signal that is ignored stays ignored, as in a process that `nohup` has started.

    Args:
        handler: As in `signal.signal`.
        *names: Names of the signals, such as "SIGTERM". A system may lack some.
    """
    main = threading.current_thread() is threading.main_thread()
    numbers = [signal.Signals[name] for name in names if main and name in signal.Signals.__members__]
    previous = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number in numbers if previous[number] != signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, handler)
        yield
    finally:
        for number in handled:
            signal.signal(number, previous[number])
