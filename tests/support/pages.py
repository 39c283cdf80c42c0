"""Servers of the page that can be slow, die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import uvicorn

from acgpt.serving.app import create_app


class Address:
    """An address with a server behind it, which may stop and start again.

    Args:
        service: Answers the requests.
        settings: Arguments of `create_app`.
    """

    def __init__(self, service, **settings):
        self.app, self.delay = create_app(service, **settings), 0.0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.server, self.thread, self.paths = f"http://127.0.0.1:{self.port}", None, None, []

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        if scope["path"].startswith("/v1/") and scope["method"] == "POST":
            await asyncio.sleep(self.delay)
        await self.app(scope, receive, send)

    def start(self):
        config = uvicorn.Config(self, port=self.port, log_level="error", lifespan="off", ws="none")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(30)


@contextlib.contextmanager
def served(service, **settings):
    address = Address(service, **settings)
    address.start()
    yield address
    address.stop()
