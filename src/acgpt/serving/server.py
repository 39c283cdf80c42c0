"""Run the server: load the model, answer, and drain on SIGTERM.

loading     every request is answered with 503; only the page is shown, and waits
ready       requests are answered
draining    after SIGTERM or Ctrl-C: new requests get 503, accepted ones are finished; clients that do not read
            their replies are dropped
stopped     after a second signal: accepted requests get 503, and the process ends with exit code 1

torch is imported while requests are already answered, with 503.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import uvicorn
from starlette.types import ASGIApp

from acgpt.serving.connection import most_connections, settings
from acgpt.serving.gate import Gate
from acgpt.serving.options import ServeOptions

if TYPE_CHECKING:
    from acgpt.models.language_model import LanguageModel
    from acgpt.serving.service import Service

LAST_SECONDS = 2.0  # for the replies to requests that a second signal has ended
DRAINED_SECONDS = 5.0  # for clients to read their replies, after the last answer


class Server(uvicorn.Server):
    """uvicorn's server, which drains on the first signal and stops on the second.

    Args:
        gate: The application.
        seconds: Time that requests may take after the first signal.
    """

    def __init__(self, gate: Gate, seconds: float) -> None:
        super().__init__(settings(gate, limit_concurrency=most_connections(), timeout_graceful_shutdown=20))
        self.gate, self.seconds = gate, seconds
        self.service: Service | None = None
        self.signals = 0
        self.failure: BaseException | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM and Ctrl-C: drain, then stop."""
        self.signals += 1
        if self.service is None:
            self.should_exit = self.force_exit = True
        elif self.signals == 1:
            print("draining: accepted requests are finished. Send the signal again to stop now.", file=sys.stderr)
            threading.Thread(target=self.drain, args=(self.service,), daemon=True).start()
        elif self.signals == 2:
            threading.Thread(target=self.stop, args=(self.service,), daemon=True).start()

    def drain(self, service: Service) -> None:
        """Finish what was accepted, then exit."""
        service.scheduler.close(timeout=self.seconds)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections; those of clients that do not read their replies, after some seconds."""
        asyncio.get_running_loop().call_later(DRAINED_SECONDS, self.drop_connections)
        await super().shutdown(sockets)

    def drop_connections(self) -> None:
        """Drop all connections."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def stop(self, service: Service) -> None:
        """Answer accepted requests with 503, and end the process with exit code 1."""
        service.stop()
        end = time.monotonic() + LAST_SECONDS
        while self.server_state.tasks and time.monotonic() < end:
            time.sleep(0.01)
        end_process(1)

    def open(self, load: Callable[[], tuple[Service, ASGIApp]], opened: Callable[[], None]) -> None:
        """Load the model, in a thread of its own, and answer requests from then on; if that fails, stop.

        Args:
            load: Loads the model.
            opened: Called when requests are answered.
        """
        try:
            self.service, self.gate.app = load()
            opened()
        except BaseException as error:
            self.failure, self.should_exit = error, True


def end_process(code: int) -> NoReturn:
    """End the process without waiting for threads.

    The interpreter cannot end regularly while a thread computes: C++ code in that thread would abort the process.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def serve(
    options: ServeOptions,
    keys: Sequence[str],
    listener: socket.socket,
    load: Callable[[], LanguageModel],
    name: str,
    note: Callable[[str], None],
) -> None:
    """Serve a model until a signal ends it. A second signal ends the process, with exit code 1.

    Args:
        options: Options of the server.
        keys: API keys, one of which a client must send. None: no key is needed.
        listener: The socket to accept connections from.
        load: Loads the model.
        name: Name of the model, as clients see it.
        note: Prints a line for the user.

    Raises:
        InputError: The model cannot be loaded.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = Server(Gate(), options.timeout)

    def start() -> tuple[Service, ASGIApp]:
        lm = load()
        from acgpt.serving.app import create_app
        from acgpt.serving.scheduler import Scheduler
        from acgpt.serving.service import Service
        from acgpt.serving.warm_up import warm_up

        scheduler = Scheduler(lm.searches.executor, most_waiting=options.queue, most_rows=options.max_rows)
        if scheduler.executor.engine.cuda:
            note("compiling kernels for this GPU, which takes longer the first time")
            warm_up(lm, scheduler)
        service = Service(lm, scheduler, limits=options, name=name)
        return service, create_app(service, keys=keys, cors=options.cors, address=address)

    address, port = listener.getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    opening = threading.Thread(
        target=server.open, args=(start, lambda: note(f"serving {name} on {url}")), name="acgpt-loading", daemon=True
    )
    opening.start()
    server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure
    if opening.is_alive() or (server.service is not None and server.service.scheduler.thread.is_alive()):
        end_process(0)
