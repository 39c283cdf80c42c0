"""The record of the server's OpenAPI document."""

from __future__ import annotations

from typing import Any

from record import check
from servers import service_of, tiny_lm

import acgpt
from acgpt.serving.app import create_app


def without_versions(node: Any) -> Any:
    """Return the document without what depends on the versions of acgpt and of libraries.

    FastAPI adds its own schemas of errors to every route, which the server does not send.
    """
    if isinstance(node, list):
        return [without_versions(item) for item in node]
    if not isinstance(node, dict):
        return node.replace(acgpt.__version__, "<version>") if isinstance(node, str) else node
    dropped = ("HTTPValidationError", "ValidationError", "openapi", "operationId")
    return {key: without_versions(value) for key, value in node.items() if key not in dropped}


def test_openapi() -> None:
    with service_of(tiny_lm()) as service:
        check("openapi", without_versions(create_app(service).openapi()))
