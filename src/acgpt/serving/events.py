"""Streams of server-sent events.

    data: {"text": " Fr", "slot": 0, "fill": null}

    event: error
    data: {"error": {"message": "…", …}}

Errors before the first event are replies with a status of their own; later ones are an event, the last one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from acgpt.errors import log_failure
from acgpt.models.executor import Search
from acgpt.serving.errors import UNEXPECTED, error_body, kind_of
from acgpt.serving.service import Service


def event(fields: Any, name: str | None = None) -> str:
    """Return one event, with a JSON object as its data."""
    data = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


async def event_stream(
    service: Service,
    make: Callable[[Callable[[Any], object]], Search[Any]],
    request: Request,
    encode: Callable[[AsyncGenerator[Any]], AsyncGenerator[Any]],
    last: str = "",
) -> StreamingResponse:
    """Return a reply that sends as events what a search reports. If the client hangs up, the search is cancelled.

    Args:
        service: Runs the search, and waits for the first event.
        make: Makes the search; it is passed a function that reports an item.
        request: The request.
        encode: Makes objects for JSON from the items, one for each event.
        last: What is sent at the end, if nothing has failed.
    """
    items: AsyncGenerator[Any] = service.stream(make)
    objects = encode(items)
    first = await service.wait(anext(objects), request)

    async def events() -> AsyncIterator[str]:
        try:
            yield event(first)
            async for fields in objects:
                yield event(fields)
            if last:
                yield last
        except Exception as error:
            if kind_of(error) is UNEXPECTED:
                log_failure(error)
            yield event(error_body(error), "error")
        finally:
            await objects.aclose()
            await items.aclose()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
