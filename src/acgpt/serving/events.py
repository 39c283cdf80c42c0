"""Streams of server-sent events.

    data: {"text": " Fr", "slot": 0, "fill": null}

    event: error
    data: {"error": {"message": "…", …}}

Errors before the first event are replies with a status of their own; later ones are an event, the last one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from acgpt.serving.errors import UNEXPECTED, error_body, kind_of
from acgpt.serving.log import log_failure
from acgpt.serving.service import Service

Item = TypeVar("Item")


def event(fields: Any, name: str | None = None) -> str:
    """Return one event, with a JSON object as its data."""
    data = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


async def event_stream(
    service: Service,
    items: AsyncIterator[Item],
    request: Request,
    encode: Callable[[Item], Any] = lambda item: item,
    last: str = "",
) -> StreamingResponse:
    """Return a reply that sends each item as an event. If the client hangs up, the stream of items is closed.

    Args:
        service: Waits for the first item.
        items: The items.
        request: The request.
        encode: Makes an object for JSON from an item.
        last: What is sent at the end, if nothing has failed.
    """
    first = await service.wait(anext(items), request)

    async def events() -> AsyncIterator[str]:
        try:
            yield event(encode(first))
            async for item in items:
                yield event(encode(item))
            if last:
                yield last
        except Exception as error:
            if kind_of(error) is UNEXPECTED:
                log_failure(error)
            yield event(error_body(error), "error")
        finally:
            with contextlib.suppress(AttributeError):
                await items.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
