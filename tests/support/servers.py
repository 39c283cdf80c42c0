"""A tiny model behind a server, in this process or on a port."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import uvicorn
from fastapi.testclient import TestClient
from models import tiny_model, tiny_tokenizer

from acgpt import LanguageModel, Metadata
from acgpt.engine.length_head import FILE, LengthHead
from acgpt.models.scheduler import Scheduler
from acgpt.serving.app import create_app
from acgpt.serving.options import LimitOptions
from acgpt.serving.server import settings as server_settings
from acgpt.serving.service import Service

WIDTH, MASK = 32, 2


def tiny_lm(lengths=False, positions=96):
    """Return a tiny model in float64; with `lengths` it predicts lengths of gaps."""
    network = tiny_model("llama", vocabulary=340, scale=0.15, width=WIDTH, positions=positions).double().eval()
    metadata, head = Metadata(mask_token_id=MASK), None
    if lengths:
        metadata = Metadata(mask_token_id=MASK, lengths={"file": FILE, "distance": 5})
        head, generator = LengthHead(WIDTH, 5).double(), torch.Generator().manual_seed(0)
        for weight in head.parameters():
            weight.data.normal_(0, 0.3, generator=generator)
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>", mask_token="<mask>")
    return LanguageModel(network, tokenizer, metadata=metadata, length_head=head)


def local_client(app):
    """Return a client of an application in this process; the host of its requests is this machine."""
    return TestClient(app, base_url="http://localhost")


@dataclass
class Running:
    """A server that listens."""

    url: str
    service: Service
    server: uvicorn.Server


@contextlib.contextmanager
def service_of(lm, name="acgpt", **limits) -> Iterator[Service]:
    """Yield a service with these limits, and close its scheduler."""
    chosen = LimitOptions(**limits)
    scheduler = Scheduler(lm.searches.executor, most_waiting=chosen.queue, most_rows=chosen.max_rows)
    yield Service(lm, scheduler, limits=chosen, name=name)
    assert scheduler.close(drain=False, timeout=60)


@contextlib.contextmanager
def running(service, **settings) -> Iterator[Running]:
    """Run a server on a free port, in a thread."""
    server = uvicorn.Server(server_settings(create_app(service, **settings), port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Running(f"http://127.0.0.1:{port}", service, server)
    server.should_exit = server.force_exit = True
    thread.join(30)


@contextlib.contextmanager
def serving(lm, name="tiny") -> Iterator[tuple[str, Service]]:
    """Serve a model on a free port; yield the address and the service."""
    with service_of(lm, name) as service, running(service) as server:
        yield server.url, service


def until(condition, seconds=60.0):
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
