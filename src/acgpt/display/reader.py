"""The reader of a model with several adapters: the tokenizer, and the adapter that would answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from transformers import AutoConfig

from acgpt.display.show import Reader, load_reader, query_of
from acgpt.models.adapters import BARE, Adapter, metadata_by_name
from acgpt.models.loading import from_pretrained, metadata_of, read_metadata, resolve_all, routed
from acgpt.models.router import route


def choose_reader(
    template: str,
    model: str | None = None,
    adapters: Mapping[str, str] | str | Literal[False] | None = None,
    future: bool | None = None,
) -> tuple[Reader, dict[str, str | None], bool]:
    """Determine how a model would read a template. Only the tokenizer is loaded.

        reader, about, future = choose_reader("The {{cat}} sat.", adapters={"infill": "runs/a", "scattered": "runs/b"})
        about["adapter"]        # the one that would answer

    Args:
        template: The template.
        model: As in `acgpt.load`.
        adapters: As `adapter` in `acgpt.load`.
        future: Whether to show copies. Default: yes; with several adapters, as the adapter that would answer reads.

    Returns:
        The reader, the JSON field of the adapter that would answer (empty if none), and whether copies are shown.
    """
    source, folders = resolve_all(model, adapters)
    one = next(iter(folders.values())) if isinstance(adapters, Mapping) else adapters
    reader = load_reader(model, one)  # adapters share tokenizer and BOS
    if not routed(folders):
        about: dict[str, str | None] = {"adapter": next(iter(folders))} if adapters else {}
        return reader, about, True if future is None else future
    config = None if source.endswith(".gguf") else from_pretrained(AutoConfig, source)
    metadata = {name: read_metadata(folder) for name, folder in folders.items()}
    own = metadata_by_name(metadata, tuple(folders), metadata_of(source, None, config))
    query = query_of(template, reader.tokenizer)
    chosen = route(query, {name: Adapter.of(name, own[name]) for name in folders}, own[BARE], future)
    answering = own[chosen.adapter or BARE]
    reads = answering is not None and answering.reads_copies
    shown = True if chosen.future is None else chosen.future
    return replace(reader, reads_future=reads), {"adapter": chosen.adapter}, shown
