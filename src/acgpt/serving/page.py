"""The web page of the server: the files in `page/`, at `/` and below `/page/`.

The files are read once, when the server starts. There is no build step: what is in the folder is what the browser runs.
The policy lets a browser load nothing from elsewhere, run no inline script, and never turn a string into HTML.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask each time, and get 304 unless acgpt was updated
}


@cache
def pages() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Return the content and headers of the files of the page by their paths on the server."""
    found = {}
    for entry in files("acgpt.serving").joinpath("page").iterdir():
        if kind := TYPES.get(Path(entry.name).suffix):
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            found[path] = content, {**HEADERS, "Content-Type": kind, "ETag": etag}
    return found


def reply(path: str, known: str | None) -> Response | None:
    """Return a file, 304 if the browser has it, or `None` if there is no such file.

    Args:
        path: Path on the server.
        known: The version that the browser has, its header `If-None-Match`.
    """
    if path not in pages():
        return None
    content, headers = pages()[path]
    if known is not None and headers["ETag"] in known:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)


def router() -> APIRouter:
    """Return the routes of the files. They are for browsers, and not in the OpenAPI schema."""
    routes = APIRouter()

    async def send(request: Request) -> Response:
        """Send a file of the page."""
        found = reply(request.url.path, request.headers.get("if-none-match"))
        assert found is not None, "every route is that of a file"
        return found

    for path in pages():
        routes.add_api_route(path, send, methods=["GET", "HEAD"], include_in_schema=False)
    return routes
