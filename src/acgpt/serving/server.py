"""Run the server: listen at once, load the model, answer, and drain on SIGTERM.

loading     every request is answered with 503, as llama.cpp's server does; only the page is shown, and waits
ready       requests are answered
draining    after SIGTERM or Ctrl-C: new requests get 503, accepted ones are finished; a second signal stops
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from acgpt.errors import InputError
from acgpt.models.language_model import LanguageModel
from acgpt.serving.app import create_app, unavailable
from acgpt.serving.options import ServeOptions
from acgpt.serving.page import reply
from acgpt.serving.scheduler import Scheduler
from acgpt.serving.service import Service

VARIABLE = "ACGPT_API_KEY"


def read_keys(options: ServeOptions) -> list[str]:
    """Return the API keys: the lines of the file, or else the value of the environment variable.

    Raises:
        InputError: The file cannot be read or has no key, or a key cannot be sent in a header.
    """
    if options.api_key_file is None:
        source, texts = VARIABLE, [os.environ.get(VARIABLE, "")]
    else:
        source = str(options.api_key_file)
        try:
            texts = Path(options.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {source}: {error}. Choose a text file with one key per line.") from error
    keys = [text.strip() for text in texts if text.strip()]
    if options.api_key_file is not None and not keys:
        raise InputError(f"{source} has no key: write one per line.")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise InputError(f"a key in {source} has characters other than letters, digits and signs.")
    return keys


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(options: ServeOptions, keys: list[str]) -> socket.socket:
    """Return a socket that listens.

    Raises:
        InputError: The address needs a key, or cannot be listened on.
    """
    if not keys and not is_loopback(options.host):
        raise InputError(
            f"`host={options.host}` can be reached from other machines, which needs an API key. Set `api_key_file` or "
            f"the environment variable {VARIABLE}."
        )
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot listen on {options.host}, port {options.port}: {reason}. Choose another.") from error


class Gate:
    """The application that uvicorn runs: it refuses requests until the model is loaded, then hands them on."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":  # neither lifespan events nor web sockets are used
            return
        await (self.app or self.loading(scope))(scope, receive, send)

    def loading(self, scope: Scope) -> ASGIApp:
        """Return the reply to a request before the model is loaded: a file of the page, or 503."""
        known = Headers(scope=scope).get("if-none-match")
        page = reply(scope["path"], known) if scope["method"] == "GET" else None
        return page or unavailable("Loading model")


class Server(uvicorn.Server):
    """uvicorn's server, which drains on the first signal and stops on the second.

    Args:
        gate: The application.
        seconds: Time that requests may take after the first signal.
    """

    def __init__(self, gate: Gate, seconds: float) -> None:
        config = uvicorn.Config(gate, lifespan="off", access_log=False, log_config=None, server_header=False, ws="none")
        super().__init__(config)
        self.gate, self.seconds = gate, seconds
        self.service: Service | None = None
        self.signals = 0
        self.failure: BaseException | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM and Ctrl-C: drain, then stop."""
        self.signals += 1
        if self.signals == 1 and self.service is not None:
            print("draining: accepted requests are finished. Send the signal again to stop now.", file=sys.stderr)
            threading.Thread(target=self.drain, args=(self.service,), daemon=True).start()
            return
        if self.service is not None:
            threading.Thread(target=self.service.scheduler.close, kwargs={"drain": False}, daemon=True).start()
        self.should_exit = self.force_exit = True

    def drain(self, service: Service) -> None:
        """Finish what was accepted, then exit."""
        service.scheduler.close(timeout=self.seconds)
        self.should_exit = True

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


def serve(options: ServeOptions, load: Callable[[], LanguageModel], name: str, note: Callable[[str], None]) -> bool:
    """Serve a model until a signal ends it.

    Args:
        options: Options of the server.
        load: Loads the model.
        name: Name of the model, as clients see it.
        note: Prints a line for the user.

    Returns:
        Whether all accepted requests were answered.

    Raises:
        InputError: The model cannot be loaded, a key is missing, or the address cannot be listened on.
    """
    keys = read_keys(options)
    listener = listen(options, keys)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = Server(Gate(), options.timeout)

    def start() -> tuple[Service, ASGIApp]:
        lm = load()
        scheduler = Scheduler(lm.searches.executor, most_waiting=options.queue, most_rows=options.max_rows)
        service = Service(lm, scheduler, limits=options, name=name)
        return service, create_app(service, keys=keys, cors=options.cors)

    address, port = listener.getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    threading.Thread(target=server.open, args=(start, lambda: note(f"serving {name} on {url}")), daemon=True).start()
    server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure
    return server.service is None or not server.force_exit
