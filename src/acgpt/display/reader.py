"""What a drawing of the input of a model needs: the tokenizer, and the adapter that would answer. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from acgpt.display.show import query_of
from acgpt.errors import InputError
from acgpt.methods import METHODS
from acgpt.models.adapters import BARE, Adapter, metadata_by_name
from acgpt.models.loading import default_bos, from_pretrained, read_metadata, resolve, routed
from acgpt.models.metadata import choose_bos, model_method
from acgpt.models.router import route


@dataclass(frozen=True)
class Reader:
    """The parts of a model that a drawing needs: tokenizer, BOS, MASK, and whether it was trained to read copies."""

    tokenizer: PreTrainedTokenizerBase
    bos: int
    mask: int | None
    reads_future: bool


def choose_reader(
    template: str,
    model: str | None = None,
    adapters: Mapping[str, str] | str | Literal[False] | None = None,
    future: bool | None = None,
) -> tuple[Reader, dict[str, str | None], bool]:
    """Determine how a model would read a template, with the token ids that `acgpt.load` would choose.

        reader, about, future = choose_reader("The {{cat}} sat.", adapters={"infill": "runs/a", "scattered": "runs/b"})
        about["adapter"]        # the one that would answer

    Args:
        template: The template.
        model: As in `acgpt.load`: a folder, a hub id, a `.gguf` file, or by default the embedded model.
        adapters: As `adapter` in `acgpt.load`.
        future: Whether to show copies. Default: yes; with several adapters, as the adapter that would answer reads.

    Returns:
        The reader, the JSON field of the adapter that would answer (empty if none), and whether copies are shown.
    """
    source, folders = resolve(model, adapters)
    tokenizer = from_pretrained(AutoTokenizer, source)
    config = None if source.endswith(".gguf") else from_pretrained(AutoConfig, source)
    metadata = {name: read_metadata(folder) for name, folder in folders.items()}
    own = metadata_by_name(metadata, tuple(folders), read_metadata(source, config))
    first = own[next(iter(folders), BARE)]  # adapters share tokenizer and BOS
    if not (method := model_method(first)).drawable:
        drawable = " and ".join(name for name, other in METHODS.items() if other.drawable)
        raise InputError(
            f"cannot draw the layout of a model of method {method.name}, only those of {drawable}: see "
            "docs/explanation/methods.md."
        )
    bos = choose_bos(default_bos(model, first), first, tokenizer)
    mask = None if first is None else first.mask_token_id
    name = next(iter(folders), None)
    about = {"adapter": name} if adapters else {}
    if routed(folders):
        query = query_of(template, tokenizer)
        chosen = route(query, {name: Adapter.of(name, own[name]) for name in folders}, own[BARE], future)
        name, future, about = chosen.adapter, chosen.future, {"adapter": chosen.adapter}
    answering = own[name or BARE]
    reader = Reader(tokenizer, bos, mask, answering is not None and answering.reads_copies)
    return reader, about, True if future is None else future
