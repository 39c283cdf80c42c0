"""Run the server: load the model, answer, and drain on SIGTERM.

loading     every request is answered with 503; only the page is shown, and waits
ready       requests are answered
draining    after SIGTERM or Ctrl-C: new requests get 503, accepted ones are finished; clients that do not read
            their replies are dropped
stopped     after a second signal: accepted requests get 503, and the process ends with exit code 1

torch is imported while requests are already answered, with 503: this module does not import it.

uvicorn bounds neither how long a client may take to send the head of a request and to read a reply, nor how many
connections there are. Its protocol on top of h11 is used, also where httptools is installed, so that connections are
the same on all machines.

    waits for a head    closed after `HEAD_SECONDS`
    sends a body        see `middleware.read_body`
    reads a reply       dropped if it has read nothing for `STALL_SECONDS`
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
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from acgpt.serving.errors import Rejected, error_reply, unavailable
from acgpt.serving.options import ServeOptions
from acgpt.serving.page import reply

if TYPE_CHECKING:
    from acgpt.models.language_model import LanguageModel
    from acgpt.serving.service import Service

HEAD_SECONDS = 10.0  # from the first byte of a request, or from the connection, to the end of its head
STALL_SECONDS = 20.0  # without a byte of a reply that is read
MOST_CONNECTIONS = 1000
RESERVED_FILES = 128  # that are left for other things than connections
LAST_SECONDS = 2.0  # for the replies to requests that a second signal has ended
DRAINED_SECONDS = 5.0  # for clients to read their replies, after the last answer


# ---- until the model is loaded --------------------------------------------------------------------------------------


class Gate:
    """Hands requests to `app`; until it is set, answers with a file of the page or 503."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":  # neither lifespan events nor web sockets are used
            return
        await (self.app or self.loading(scope))(scope, receive, send)

    def loading(self, scope: Scope) -> ASGIApp:
        """Return the reply to a request before the model is loaded."""
        if scope["path"] == "/health":
            return unavailable("Loading model")
        known = Headers(scope=scope).get("if-none-match")
        page = reply(scope["path"], known) if scope["method"] == "GET" else None
        message = "the model is being loaded. Try again when GET /health returns 200."
        return page or error_reply(Rejected("loading", message))


# ---- connections ----------------------------------------------------------------------------------------------------


class Connection(H11Protocol):
    """A connection with time limits. The number of connections is bounded by `limit_concurrency` of uvicorn's settings.

    A client above the bound is told so in reply to its request. If many more come, they are not even heard.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.most, self.limit_concurrency = self.limit_concurrency, None  # uvicorn would answer with plain text
        self.timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that `pause_writing` is called whenever the client is slower
        if self.most is not None and len(self.connections) > self.most:
            message = f"the server has {self.most} connections, which is the limit. Try again later."
            self.app = error_reply(Rejected("too_many_connections", message), {"Connection": "close"})
            if len(self.connections) > self.most + RESERVED_FILES // 2:
                return transport.abort()
        self.timers["head"] = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request; the time for its head begins, goes on or ends."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.end_timer("head")
        elif "head" not in self.timers:
            self.timers["head"] = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self.watch()

    def resume_writing(self) -> None:
        """Go on: the client has read all."""
        self.end_timer("stall")
        super().resume_writing()

    def watch(self, before: int | None = None) -> None:
        """Drop the connection if the client has read nothing since the last call.

        Args:
            before: Bytes that it had not read then.
        """
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            return self.transport.abort()
        self.timers["stall"] = self.loop.call_later(STALL_SECONDS, self.watch, left)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time limits."""
        for name in list(self.timers):
            self.end_timer(name)
        super().connection_lost(exc)

    def end_timer(self, name: str) -> None:
        """Stop a timer, if it runs."""
        if name in self.timers:
            self.timers.pop(name).cancel()


def settings(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return the settings of uvicorn.

    Args:
        app: The application.
        **options: Other settings.
    """
    fixed = {"log_config": None, "server_header": False, "access_log": False, "limit_concurrency": MOST_CONNECTIONS}
    return uvicorn.Config(app, http=Connection, ws="none", lifespan="off", **(fixed | options))


def most_connections() -> int:
    """Let the process open as many files as it may, and return how many connections it can have."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (ValueError, OSError):  # macOS: the hard limit is infinite, but may not be chosen
        pass
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - RESERVED_FILES))


# ---- the process ----------------------------------------------------------------------------------------------------


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
        from acgpt.models.scheduler import Scheduler
        from acgpt.serving.app import create_app
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
