"""Servers of tiny models."""

from __future__ import annotations

import pytest
from servers import local_client, service_of, tiny_lm

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
