r"""llama.cpp's infill, which the editor plugins llama.vim and llama.vscode speak.

    POST /infill    {"input_prefix": "def f(x):\n", "prompt": "    ", "input_suffix": "\n    return y\n"}
    GET  /props     the size of the context, and defaults

The text between `input_prefix` + `prompt` and `input_suffix` is filled. Unknown fields are ignored, as llama.cpp does,
and so are those for which there is nothing to do. A request for no tokens (`n_predict` 0), with which editors warm up
the cache of prompts, is answered at once and warms up nothing.

    context     extra chunks │ the end of the prefix │ gap │ the beginning of the suffix

What does not fit into the model's positions is cut off: whole chunks, the oldest first, then the beginning of the
prefix and the end of the suffix, of which the prefix gets three quarters. Then the reply says that it is `truncated`.

Without a temperature the best fill is returned. `t_max_predict_ms` ends the search for it: the best of the fills that
were found so far is returned, and the batch that is being computed is finished first.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from acgpt.models.ask import MAX_TOKENS
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
from acgpt.serving.schemas import BoundedStops, Lenient
from acgpt.serving.service import Service
from acgpt.version import __version__

PREFIX_SHARE = 0.75  # of the room for prefix and suffix, if both are too long
CHARACTERS = 64  # per token, that are looked at when a text is cut


class Chunk(Lenient):
    """A part of another file, or of another place in this one."""

    text: str = ""
    filename: str = ""


class InfillRequest(Lenient):
    """A request for a text between a prefix and a suffix."""

    input_prefix: str = Field("", description="Text before the gap.")
    input_suffix: str = Field("", description="Text after the gap.")
    input_extra: list[Chunk] = Field([], fail_fast=True, description="Further context, the most recent last.")
    prompt: str = Field("", description="Text after the prefix, such as the line up to the cursor.")
    n_predict: int = Field(-1, description="Maximum number of tokens; negative: that of gaps; 0: none.")
    t_max_predict_ms: float = Field(0, description="Time after which the best fill so far is returned; 0: no limit.")
    t_max_prompt_ms: float = Field(0, description="Ignored.")
    n_cmpl: int = Field(1, ge=1, description="Number of texts; the reply to several is a list. A stream has one.")
    n_indent: int = Field(0, ge=0, description="The text ends before a line that is indented less.")
    temperature: float = Field(0.0, description="Sampling temperature. Default: 0, the best fill.")
    top_k: int = Field(0, description="Draw from the most probable tokens only; 0 or less: from all.")
    top_p: float = Field(1.0, description="Nucleus sampling: total probability of the tokens drawn from.")
    seed: int = Field(-1, description="Seed; -1: a new one.")
    stop: Annotated[Annotated[list[str], Field(fail_fast=True)] | str | None, BoundedStops] = Field(
        None, description="Strings before which the text ends."
    )
    samplers: Any = Field(None, description="Ignored.")
    cache_prompt: Any = Field(None, description="Ignored.")
    stream: bool = Field(False, description="Send parts of the text as they are drawn.")
    response_fields: list[str] = Field(
        [], fail_fast=True, description="Paths of the fields to return, such as timings/prompt_n."
    )
    model: str | None = Field(None, description="The served model, one of its adapters, or none. Default: the model.")

    def ask(self, service: Service) -> CompletionAsk:
        """Return what is asked for. The context is not cut yet, see `fit`."""
        most = max(1, service.lm.positions // 2)
        return asked(
            self,
            prompt=[self.input_prefix + self.prompt],
            suffix=self.input_suffix,
            max_tokens=None if self.n_predict < 0 else min(self.n_predict, most),
            n=1 if self.stream else self.n_cmpl,
            temperature=max(0.0, self.temperature),
            top_p=self.top_p if 0 < self.top_p < 1 else 1.0,
            top_k=self.top_k if self.top_k > 0 else None,
            stop=tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or [])),
            seconds=self.t_max_predict_ms / 1000 if self.t_max_predict_ms > 0 else None,
            adapter=service.adapter_of(self.model if self.model in service.models else None),
            heal=True,
        )


class Clock:
    """Times of a request, for `timings`."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.first: float | None = None  # when the first token was drawn

    def notice(self, tokens: int) -> None:
        """Note that tokens were drawn."""
        self.first = time.perf_counter() if self.first is None else self.first

    def timings(self, result: Completions) -> dict[str, Any]:
        """Return the times and speeds, in the terms of llama.cpp; numbers other than those of tokens are floats."""
        timings: dict[str, Any] = {}
        end = time.perf_counter()
        first = end if self.first is None else self.first
        for name, tokens, seconds in (
            ("prompt", result.prompt_tokens, first - self.begin),
            ("predicted", result.drawn_tokens, end - first),
        ):
            timings[f"{name}_n"] = tokens
            timings[f"{name}_ms"] = 1000 * seconds
            timings[f"{name}_per_token_ms"] = 1000 * seconds / max(1, tokens)
            timings[f"{name}_per_second"] = tokens / seconds if seconds > 0 else 0.0
        return timings


def router(service: Service) -> APIRouter:
    """Return the routes; `service` answers the requests."""
    routes, completer, lm = APIRouter(tags=["llama.cpp"]), Completer(service.lm), service.lm

    @routes.post("/infill")
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Fill the gap between a prefix and a suffix."""
        clock = Clock()
        whole = replace(body.ask(service), notice=clock.notice)
        most = service.limits.max_tokens_per_request
        ask, truncated = await service.prepare(lambda: fit(completer, whole, body.input_extra, most))

        def final(result: Completions, index: int = 0) -> dict[str, Any]:
            """Return the reply for one of the texts."""
            text = result.texts[index]
            return {
                "index": index,
                "content": text.text,
                "tokens": [],
                "id_slot": 0,
                "stop": True,
                "model": service.name,
                "tokens_predicted": result.drawn_tokens,
                "tokens_evaluated": result.prompt_tokens,
                "generation_settings": generation_settings(service, ask),
                "prompt": ask.prompt[0],
                "has_new_line": "\n" in text.text,
                "truncated": truncated,
                "stop_type": text.ended_by,
                "stopping_word": text.word,
                "tokens_cached": 0,
                "timings": clock.timings(result),
            }

        if ask.max_tokens == 0:
            result = Completions((Completion("", (), "limit"),), 0, 0)
            return JSONResponse(selected(final(result), body.response_fields))
        await service.prepare(lambda: check_limits(service, completer, ask, length="n_predict"))
        if body.stream:
            chunks = partial(chunked, body=body, final=final)
            return await service.event_stream(partial(completer.stream, ask), request, chunks)
        result = Completions.joined(await service.ask_all(completer.complete(ask), request))
        result = replace(result, texts=tuple(indented(text, body.n_indent) for text in result.texts))
        replies = [selected(final(result, index), body.response_fields) for index in range(ask.n)]
        return JSONResponse(replies[0] if ask.n == 1 else replies)

    @routes.get("/props")
    async def props() -> Response:
        """Return the size of the context, and the defaults of requests."""
        settings = generation_settings(service, CompletionAsk([], seed=0))
        return JSONResponse(
            {
                "default_generation_settings": {"id": 0, "n_ctx": lm.positions, "params": settings},
                "total_slots": service.scheduler.most_rows,
                "model_path": service.name,
                "model_alias": service.name,
                "chat_template": "",
                "modalities": {"vision": False, "audio": False},
                "build_info": f"acgpt-{__version__}",
            }
        )

    return routes


# ---- requests -------------------------------------------------------------------------------------------------------


def fit(completer: Completer, ask: CompletionAsk, extra: Sequence[Chunk], limit: int) -> tuple[CompletionAsk, bool]:
    """Cut a context so that it fits the model, with room for the gap.

    Args:
        completer: Tokenizes.
        ask: What is asked for, with the whole prefix and suffix.
        extra: Further context, the most recent last.
        limit: Maximum number of tokens of a request.

    Returns:
        What is asked for then, and whether something of the prefix or the suffix was cut off.
    """
    gap = MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
    positions = min(completer.lm.positions - 1, max(4, limit - ask.n * gap))
    room = max(2, positions - min(gap, positions // 2) - 8)  # a text that was cut can have a few tokens more
    (prefix,), suffix = ask.prompt, ask.suffix
    assert isinstance(prefix, str)
    # No more of a long text is tokenized than can be used.
    ends = bool(prefix[: -CHARACTERS * room]), bool(suffix[CHARACTERS * room :])
    prefix, suffix = prefix[-CHARACTERS * room :], suffix[: CHARACTERS * room]
    starts = token_starts(completer, prefix)
    later = token_starts(completer, suffix)
    before, after = len(starts), len(later)
    if before + after > room:
        most_before = max(int(PREFIX_SHARE * room), room - after)
        before = min(before, most_before)
        after = min(after, room - before)
    truncated = before < len(starts) or after < len(later) or any(ends)
    prefix = prefix[starts[-before] :] if before else ""
    suffix = suffix[: later[after]] if after < len(later) else suffix
    left, chunks = room - before - after, ""
    for chunk in reversed(extra):
        text = "\n".join(filter(None, [chunk.filename, chunk.text])) + "\n\n"
        left -= len(token_starts(completer, text)) if len(text) <= CHARACTERS * room else room + 1
        if left < 0:
            break
        chunks = text + chunks
    return replace(ask, prompt=[chunks + prefix], suffix=suffix), truncated


def token_starts(completer: Completer, text: str) -> list[int]:
    """Return where the tokens of a text begin, in characters."""
    encoding = completer.tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )
    return [start for start, _ in encoding["offset_mapping"]]


# ---- replies --------------------------------------------------------------------------------------------------------


def indented(completion: Completion, n_indent: int) -> Completion:
    """Return a completion that ends before the first line, other than its first, that is indented less."""
    if n_indent:
        for line in re.finditer(r"\n([ \t]*)(?=[^ \t\n])", completion.text):
            if len(line[1]) < n_indent:
                return replace(completion, text=completion.text[: line.start()], ended_by="limit", word="")
    return completion


def generation_settings(service: Service, ask: CompletionAsk) -> dict[str, Any]:
    """Return the settings of a request, in the terms of llama.cpp."""
    return {
        "n_ctx": service.lm.positions,
        "n_predict": -1 if ask.max_tokens is None else ask.max_tokens,
        "seed": ask.seed,
        "temperature": ask.temperature,
        "top_k": ask.top_k or 0,
        "top_p": ask.top_p,
        "stop": list(ask.stop),
    }


def selected(fields: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields with these paths, by path, as llama.cpp does; all fields if there are no paths."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = fields
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found if paths else fields


async def chunked(
    items: Parts, body: InfillRequest, final: Callable[[Completions], dict[str, Any]]
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events of a stream. A line is held back until it is known to be indented enough.

    Args:
        items: New parts of the text, and at the end the result.
        body: The request.
        final: Returns the fields of the last event.
    """
    text, sent = "", 0
    async for item in items:
        if isinstance(item, Delta):
            text += item.text
            settled = indented(Completion(text, (), ""), body.n_indent).text
            tail = re.search(r"\n[ \t\n]*\Z", settled) if body.n_indent else None
            settled = settled if tail is None else settled[: tail.start()]
        else:
            item = replace(item, texts=(indented(item.texts[0], body.n_indent),))
            settled = item.texts[0].text
        if len(settled) > sent:
            event = {"index": 0, "content": settled[sent:], "tokens": [], "stop": False}
            yield selected(event, body.response_fields)
            sent = len(settled)
        if isinstance(item, Completions):
            yield selected({**final(item), "content": ""}, body.response_fields)
