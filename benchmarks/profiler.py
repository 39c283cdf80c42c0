"""A profile of one thread, by samples of its stack that another thread takes."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 0.001  # between two samples
SWITCH = 0.0002  # after which a thread gives way: with the default the sampler would be late


class Profile:
    """Counts in how many samples each function is on the stack of a thread.

    Attributes:
        samples: Number of samples.
        within: Number of samples by function, written "folder/file.py:function".
    """

    def __init__(self) -> None:
        self.samples, self.within = 0, Counter[str]()

    @contextmanager
    def of(self, thread: threading.Thread) -> Iterator[None]:
        """Take samples of a thread inside the context."""
        ended, interval = threading.Event(), sys.getswitchinterval()

        def sample() -> None:
            while not ended.is_set():
                time.sleep(SECONDS)
                frame, names = sys._current_frames().get(thread.ident or 0), set()
                while frame is not None:
                    path = Path(frame.f_code.co_filename)
                    names.add(f"{path.parent.name}/{path.name}:{frame.f_code.co_name}")
                    frame = frame.f_back
                self.samples += 1
                self.within.update(names)

        sampler = threading.Thread(target=sample, daemon=True)
        sys.setswitchinterval(SWITCH)
        sampler.start()
        try:
            yield
        finally:
            ended.set()
            sampler.join()
            sys.setswitchinterval(interval)

    def shares(self, least: float = 0.01) -> dict[str, float]:
        """Return the share of samples of each function that has at least so many, the largest first."""
        found = {name: count / max(1, self.samples) for name, count in self.within.most_common()}
        return {name: round(share, 4) for name, share in found.items() if share >= least}
