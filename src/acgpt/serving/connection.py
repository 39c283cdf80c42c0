"""Connections: how long a client may take to send the head of a request and to read a reply, and how many there are.

    waits for a head    closed after `HEAD_SECONDS`
    sends a body        see `middleware.BodyRead`
    reads a reply       dropped if it has read nothing for `STALL_SECONDS`

uvicorn bounds none of these. Its protocol on top of h11 is used, also where httptools is installed, so that connections
are the same on all machines. This module imports no torch: the server needs it before the model is loaded.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from acgpt.serving.error_body import HEADERS, Kind, body_of

HEAD_SECONDS = 10.0  # from the first byte of a request, or from the connection, to the end of its head
STALL_SECONDS = 20.0  # without a byte of a reply that is read
MOST_CONNECTIONS = 1000
RESERVED_FILES = 128  # that are left for other things than connections
TOO_MANY = Kind(503, "server_error", "too_many_connections")


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
            self.app = too_many(self.most)
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


def too_many(most: int) -> ASGIApp:
    """Return the application for connections above the bound."""
    message = f"the server has {most} connections, which is the limit. Try again later."
    headers = {**HEADERS[TOO_MANY.status], "Connection": "close"}
    return JSONResponse(body_of(message, TOO_MANY), TOO_MANY.status, headers)


def settings(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return the settings of uvicorn.

    Args:
        app: The application.
        **options: Other settings.
    """
    fixed: dict[str, Any] = {"http": Connection, "ws": "none", "lifespan": "off", "access_log": False}
    fixed |= {"log_config": None, "server_header": False, "limit_concurrency": MOST_CONNECTIONS}
    return uvicorn.Config(app, **(fixed | options))


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
