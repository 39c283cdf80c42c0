"""OpenAI's completions: the routes that the `openai` package, editors and lm-evaluation-harness speak.

    POST /v1/completions        {"model": "acgpt", "prompt": "def f(x):", "suffix": "return y"}
    GET  /v1/models             the served model, and its adapters
    GET  /v1/models/{model}

See `serving.completions` for what a prompt, a suffix and token ids mean.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from acgpt.serving.completions import (
    Completer,
    Completion,
    CompletionAsk,
    Completions,
    Delta,
    Parts,
    asked,
    check_limits,
)
from acgpt.serving.errors import InvalidField
from acgpt.serving.schemas import LARGEST, MOST_TOP, TEXT, Count, Share, Stops, Strict, Temperature, Token
from acgpt.serving.service import Service

DONE = "data: [DONE]\n\n"  # end of a stream
FEW_STOPS = 4  # strings, as OpenAI's servers take


# ---- schemas --------------------------------------------------------------------------------------------------------


def is_token(value: Any) -> bool:
    """Return whether a value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def prompts_of(value: Any) -> list[str | tuple[int, ...]]:
    """Return the prompts of a request: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(entry, str) for entry in value):
            return list(value)
        if all(map(is_token, value)):
            return [tuple(value)]
        if all(isinstance(entry, list) and entry and all(map(is_token, entry)) for entry in value):
            return [tuple(entry) for entry in value]
    raise PydanticCustomError("prompt", "it must be a text, a list of texts, token ids, or a list of token ids")


def few_stops(value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse more stop strings than OpenAI's servers take."""
    if len(value) > FEW_STOPS:
        raise PydanticCustomError("stop", f"at most {FEW_STOPS} strings are allowed")
    return value


def neutral(value: Any) -> Any:
    """Refuse a value that has an effect, of a field that is not supported."""
    if value not in (None, 0, {}, False):
        raise PydanticCustomError("unsupported", "this field is not supported; leave it out")
    return value


IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
Prompts = Annotated[
    Any,
    PlainValidator(prompts_of),
    WithJsonSchema({"anyOf": [TEXT, IDS, {"type": "array", "items": TEXT}, {"type": "array", "items": IDS}]}),
]
FewStops = Annotated[Stops, AfterValidator(few_stops)]
Neutral = Annotated[Any, AfterValidator(neutral)]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send the numbers of tokens in a last chunk.")
    include_obfuscation: bool = Field(False, description="Accepted and ignored.")


class CompletionRequest(Strict):
    """A request for completions."""

    model: str | None = Field(None, description="The served model, one of its adapters, or none. Default: the model.")
    prompt: Prompts = Field(
        description="A text, token ids, or a list of either. Token ids are read as they are sent.",
        examples=["The capital of France is"],
    )
    suffix: str | None = Field(None, description="Text after the completion, which fills the gap before it.")
    max_tokens: Token | None = Field(16, description="Maximum number of tokens; 0 is allowed with echo.")
    temperature: Temperature | None = Field(
        None, description="Sampling temperature. Default: 1; with a suffix 0, which finds the best fill."
    )
    top_p: Share | None = Field(1.0, description="Nucleus sampling: total probability of the tokens drawn from.")
    n: Count | None = Field(1, description="Number of completions per prompt.")
    best_of: Count | None = Field(None, description="Number of completions to choose the n most probable ones from.")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP, description="Return log-probabilities, with this many of the most probable tokens."
    )
    echo: bool | None = Field(False, description="Return the prompt, too.")
    stop: FewStops = Field((), description="Up to four strings before which a completion ends.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="Seed. Default: a new one.")
    stream: bool | None = Field(False, description="Send parts of the text as they are drawn.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted and ignored.")
    presence_penalty: Neutral = Field(None, description="Not supported, except for 0.")
    frequency_penalty: Neutral = Field(None, description="Not supported, except for 0.")
    logit_bias: Neutral = Field(None, description="Not supported, except if it is empty.")

    def ask(self, service: Service) -> CompletionAsk:
        """Return what is asked for.

        Raises:
            InvalidField: Fields contradict each other, or the model is unknown.
        """
        n = self.n or 1
        if self.max_tokens == 0 and not self.echo:
            raise InvalidField("max_tokens", "max_tokens may be 0 only with echo.")
        if self.best_of is not None and self.best_of < n:
            raise InvalidField("best_of", f"best_of is {self.best_of}, which is less than n, {n}.")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise InvalidField("best_of", "a stream cannot choose the best of several texts.")
        if self.suffix and self.echo and self.logprobs is not None:
            raise InvalidField("echo", "log-probabilities of the prompt cannot be asked with a suffix.")
        return asked(
            self,
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            top=self.logprobs,
            adapter=service.adapter_of(self.model),
        )


def router(service: Service) -> APIRouter:
    """Return the routes; `service` answers the requests."""
    routes, completer, started = APIRouter(tags=["openai"]), Completer(service.lm), int(time.time())

    @routes.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts, from left to right or up to a suffix."""
        ask = body.ask(service)
        await service.prepare(lambda: check_limits(service, completer, ask))
        envelope = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.name,
        }
        echoed: list[str] = []  # the prompt of each text
        if ask.echo:
            texts = await service.prepare(lambda: [completer.text_of(prompt) for prompt in ask.prompt])
            echoed = [text for text in texts for _ in range(ask.n)]
        usage = body.stream_options is not None and body.stream_options.include_usage

        async def chunks(items: Parts) -> AsyncGenerator[dict[str, Any]]:
            """Yield the chunks of a stream: prompts, once the search is accepted, parts of texts, and how they end."""
            extra, begun = {"usage": None} if usage else {}, False
            async for item in items:
                parts = [] if begun else [choice(index, prompt, None) for index, prompt in enumerate(echoed)]
                begun = True
                if isinstance(item, Delta):
                    parts.append(choice(item.index, item.text, None))
                else:
                    parts += [choice(index, "", text) for index, text in enumerate(item.texts)]
                for part in parts:
                    yield {**envelope, "choices": [part], **extra}
                if usage and isinstance(item, Completions):
                    yield {**envelope, "choices": [], "usage": item.usage}

        if body.stream:
            return await service.event_stream(partial(completer.stream, ask), request, chunks, DONE)
        result = Completions.joined(await service.ask_all(completer.complete(ask), request))
        before = echoed or [""] * len(result.texts)
        choices = [choice(index, before[index] + text.text, text) for index, text in enumerate(result.texts)]
        return JSONResponse({**envelope, "choices": choices, "usage": result.usage})

    @routes.get("/v1/models")
    async def models() -> Response:
        """List the served model and its adapters."""
        return JSONResponse({"object": "list", "data": [model_fields(name, started) for name in service.models]})

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """Describe one of them."""
        service.adapter_of(model)
        return JSONResponse(model_fields(model, started))

    return routes


def model_fields(name: str, created: int) -> dict[str, Any]:
    """Return the description of a model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "acgpt"}


def choice(index: int, text: str, completion: Completion | None) -> dict[str, Any]:
    """Return an entry of `choices`; of a stream, if the completion is not finished."""
    return {
        "index": index,
        "text": text,
        "logprobs": completion and completion.log_probs,
        "finish_reason": completion and completion.finish_reason,
    }
