"""Mistral's fill-in-the-middle completions, which the `mistralai` package and many editors speak.

    POST /v1/fim/completions    {"model": "acgpt", "prompt": "def f(x):", "suffix": "return y"}

The reply has the shape of a chat. See `serving.completions` for what a prompt and a suffix mean. Without a temperature
the best fill is returned.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from acgpt.serving.completions import Completer, CompletionAsk, Completions, Delta, Parts, asked, check_limits
from acgpt.serving.errors import InvalidField
from acgpt.serving.openai import DONE
from acgpt.serving.schemas import Count, Share, Stops, Strict, Temperature, Token
from acgpt.serving.service import Service


class FimRequest(Strict):
    """A request for a text between a prompt and a suffix."""

    model: str | None = Field(None, description="The served model, one of its adapters, or none. Default: the model.")
    prompt: str = Field(description="Text before the gap.", examples=["def area(r):\n    return "])
    suffix: str | None = Field(None, description="Text after the gap. Default: the text is continued.")
    max_tokens: Count | None = Field(None, description="Maximum number of tokens. Default: that of gaps.")
    min_tokens: Token | None = Field(None, description="Minimum number of tokens.")
    temperature: Temperature | None = Field(None, description="Sampling temperature. Default: 0, the best fill.")
    top_p: Share | None = Field(1.0, description="Nucleus sampling: total probability of the tokens drawn from.")
    random_seed: int | None = Field(None, ge=0, le=2**63 - 1, description="Seed. Default: a new one.")
    stop: Stops = Field((), description="Strings before which the text ends.")
    stream: bool | None = Field(False, description="Send parts of the text as they are drawn.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted and ignored.")

    def ask(self, service: Service) -> CompletionAsk:
        """Return what is asked for.

        Raises:
            InvalidField: Fields contradict each other, or the model is unknown.
        """
        least, most = self.min_tokens or 0, self.max_tokens
        if most is not None and least > most:
            raise InvalidField("min_tokens", f"min_tokens is {least}, which is more than max_tokens, {most}.")
        return asked(
            self,
            prompt=[self.prompt],
            seed=self.random_seed,
            adapter=service.adapter_of(self.model),
            heal=True,
        )


def router(service: Service) -> APIRouter:
    """Return the routes; `service` answers the requests."""
    routes, completer = APIRouter(tags=["mistral"]), Completer(service.lm)

    @routes.post("/v1/fim/completions")
    async def fim(body: FimRequest, request: Request) -> Response:
        """Fill the gap between a prompt and a suffix."""
        ask = body.ask(service)
        await service.prepare(lambda: check_limits(service, completer, ask))
        envelope = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": body.model or service.name}

        async def chunks(items: Parts) -> AsyncGenerator[dict[str, Any]]:
            """Yield the chunks of a stream: parts of the text, then why it ended and the numbers of tokens."""
            async for item in items:
                if isinstance(item, Delta):
                    delta, ended, more = {"role": "assistant", "content": item.text}, None, {}
                else:
                    delta, ended, more = {"content": ""}, item.texts[0].finish_reason, {"usage": item.usage}
                choices = [{"index": 0, "delta": delta, "finish_reason": ended}]
                yield {**envelope, "object": "chat.completion.chunk", "choices": choices, **more}

        if body.stream:
            return await service.event_stream(partial(completer.stream, ask), request, chunks, DONE)
        result = Completions.joined(await service.ask_all(completer.complete(ask), request))
        (text,) = result.texts
        message = {"role": "assistant", "content": text.text, "tool_calls": None, "prefix": False}
        choices = [{"index": 0, "message": message, "finish_reason": text.finish_reason}]
        return JSONResponse({**envelope, "object": "chat.completion", "choices": choices, "usage": result.usage})

    return routes
