"""Servers of tiny models."""

from __future__ import annotations

import re

import pytest
from runs import Command
from servers import local_client, service_of, tiny_lm, until

from acgpt.models.scheduler import Scheduler
from acgpt.serving.app import create_app


@pytest.fixture(scope="session")
def served_lm():
    """A tiny model that predicts no lengths."""
    return tiny_lm()


@pytest.fixture(scope="session")
def lengths_lm():
    """A tiny model that predicts lengths of gaps."""
    return tiny_lm(lengths=True)


@pytest.fixture(scope="session")
def lm(served_lm):
    return served_lm


@pytest.fixture(scope="module")
def service(served_lm):
    with service_of(served_lm) as service:
        yield service


@pytest.fixture(scope="module")
def http(service):
    """A client of the model that predicts no lengths, in this process."""
    return local_client(create_app(service))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with many positions, so that requests can take seconds."""
    folder = tmp_path_factory.mktemp("model")
    tiny_lm(positions=600).save_pretrained(folder)
    return folder


class Server(Command):
    """`acgpt serve` on a free port, in a process of its own."""

    @property
    def url(self):
        assert until(lambda: self.found() or self.process.exitcode is not None, 60)
        return self.found()[1]

    def found(self):
        return self.output.exists() and re.search(r"on (http://\S+)", self.printed())


@pytest.fixture
def start(tmp_path, folder):
    """A function that starts a server, which is killed at the end."""
    servers = []

    def start(*words, before=None, **env):
        words = ("serve", "--port", "0", "-m", folder, *words)
        servers.append(Server(*words, output=tmp_path / f"log{len(servers)}", before=before, env=env))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.join()


@pytest.fixture
def started():
    """Start schedulers; end them after the test."""
    schedulers = []

    def start(lm, **options):
        schedulers.append(Scheduler(lm.searches.executor, **options))
        return schedulers[-1]

    yield start
    for scheduler in schedulers:
        assert scheduler.close(drain=False, timeout=60)
