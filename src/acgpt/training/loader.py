"""The data loader of a run: this process's batches in their order, prepared by workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from acgpt.training.batches import Batch, Batches

PREFETCH = 4  # batches that a worker prepares in advance


@contextmanager
def loading(batches: Batches, numbers: Sequence[int], workers: int, *, pinned: bool) -> Iterator[Iterator[Batch]]:
    """Yield an iterator of batches. After the context its workers end silently, once it is deleted.

    Args:
        batches: The batches of the run.
        numbers: Numbers of the batches to load, in this order.
        workers: Maximum number of processes that prepare them; 0: this one does.
        pinned: Put them into page-locked memory, from where a GPU copies them while it computes.
    """
    workers, closing = min(workers, cores()), multiprocessing.Event()
    loader: Any = DataLoader(
        batches,
        sampler=numbers,
        batch_size=None,  # an item is a whole batch
        num_workers=workers,
        worker_init_fn=partial(initialize_worker, closing),
        prefetch_factor=PREFETCH if workers else None,
        pin_memory=pinned,
        generator=torch.Generator(),  # its own, so that seeding the workers does not change dropout
    )
    try:
        yield iter(loader)
    finally:
        closing.set()


def cores() -> int:
    """Return the number of cores that this process may use; more workers would only slow each other down."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def initialize_worker(closing: Any, worker: int) -> None:
    """Set up a worker to end silently with the main process.

    Ctrl-C and a scheduler's SIGTERM reach both, but only the main process handles them, because it may continue up to
    a checkpoint. The SIGTERM by which it ends its workers comes after `closing` is set.
    """

    def terminate(number: int, frame: Any) -> None:
        if closing.is_set():
            os._exit(0)

    def excepthook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if not issubclass(kind, ConnectionError | EOFError):  # the main process ended while a batch was sent
            sys.__excepthook__(kind, error, traceback)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, terminate)
    sys.excepthook = excepthook
