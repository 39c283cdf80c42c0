"""Attention: one function, registered with transformers, that applies the layout's mask in every architecture.

`run` passes a *backend* to the model's forward as the keyword `acgpt`; transformers hands it on to every layer. A
backend is a callable `(q, k, v, scale) -> out` that knows the attention mask:

    Dense    any device and dtype; a boolean mask over a padded rectangle. The reference, and the CPU path.
    Varlen   CUDA, bf16 and fp16; two flash attention calls over the packed batch, no mask and no padding.
    Fused    CUDA, bf16 and fp16; our own kernels for this mask, compiled on first use. For training and
             for scoring many texts.
    Cached   one decoding step: rows of different lengths against their key-value caches (see `decode`).
    Ragged   the same on CUDA, bf16 and fp16; our own kernel, which reads each row's cache only up to its length.

Without a backend, that is outside acgpt's own calls, the registered function behaves like transformers' `sdpa`. A model
that was loaded by acgpt therefore still works everywhere else.

Three things could silently apply another mask. All are prevented, and each has a test:

* transformers takes a jump in position ids for a boundary between packed documents. `run` always passes a 4-D mask,
  which switches this off.
* Someone may change the attention implementation later. `run` counts the layers that called the backend; in a compiled
  network, where layers cannot count, it checks the implementation's name.
* Layers may have a mask of their own, such as a sliding window. `check_model` refuses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from acgpt.engine.kernels import attention as kernels
from acgpt.engine.kernels import decode as decode_kernel
from acgpt.engine.layout import Layout, upload, visible
from acgpt.engine.modules import is_compiled, turn
from acgpt.errors import ModelError

NAME = "acgpt"  # the attention implementation's name in transformers, and the keyword that carries the backend
# Newer versions of torch need a flag for grouped-query attention.
SHARED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
# Additions to attention that some architectures pass and our backends would ignore.
OWN_ADDITIONS = ("sliding_window", "softcap", "s_aux", "position_bias", "indices", "block_indices")
OWN_ATTENTION = (
    "its code computes attention itself, not through transformers' attention interface. Use a model that does, such as "
    "Llama, Qwen3 or GPT-NeoX."
)
BOTH_WAYS = (
    "it reads a text both ways, so it is no causal model. If it was trained as one, set is_decoder to true in "
    "config.json."
)


class Backend(Protocol):
    """Attention for one forward pass; `calls` counts the layers that used it."""

    calls: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        """Map (rows, heads, slots, D) queries, keys and values to (rows, slots, heads, D) outputs."""
        ...


class Recorder(Cache):
    """A cache that records keys and values. A pass also attends to those of earlier passes.

    Args:
        states: Keys and values of each layer until now, each (1, heads, N, D). Default: none.
        length: The length that it reports. Positions are always passed to the model, so it need not count slots.
    """

    def __init__(self, states: Sequence[tuple[Tensor, Tensor]] = (), length: int = 0) -> None:
        super().__init__(layers=[])
        self.by_layer, self.length = dict(enumerate(states)), length

    @property
    def states(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer."""
        return list(self.by_layer.values())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values and return all of them; called by each layer in turn."""
        if layer_idx in self.by_layer:
            keys, values = self.by_layer[layer_idx]
            key_states, value_states = torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)
        self.by_layer[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Return the length."""
        return self.length


class Dense:
    """Masked attention over a rectangle of B rows `[copies | text | padding]`; exact on any device and dtype."""

    def __init__(self, layout: Layout) -> None:
        self.calls = 0
        device = layout.ids.device
        packed, real = layout.rectangle()
        home = np.empty(len(layout.ids), dtype=np.int64)
        home[packed[real]] = np.flatnonzero(real)
        mask = visible(torch.tensor(layout.copies), real.shape[1])  # padding comes last, so nothing real sees it
        self.packed, self.home = upload(packed, device), upload(home, device)  # (B, S) into the batch, (N,) and back
        self.mask = mask[:, None].to(device)  # (B, 1, S, S)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        groups = q.shape[1] // k.shape[1]  # grouped-query attention: this many query heads share a key head
        q, k, v = (x[0][:, self.packed].transpose(0, 1) for x in (q, k, v))  # (B, heads, S, D)
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        q, k = q.to(v.dtype), k.to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, dropout_p=dropout, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)[self.home][None]  # (1, N, H, D)


def as_int64(x: Tensor) -> Tensor:
    """View a tensor as int64 if the memory layout of its rows allows it; otherwise return it unchanged.

    A GPU gathers rows of half-precision numbers faster in words of eight bytes than number by number. The tensor is
    also returned unchanged if it needs a gradient, and under torch.compile, which chooses its own word size.
    """
    differentiated = torch.is_grad_enabled() and x.requires_grad
    if torch.compiler.is_compiling() or differentiated or x.device.type not in ("cpu", "cuda"):
        return x
    per_word = 8 // x.element_size()
    whole = x.stride(-1) == 1 and all(n % per_word == 0 for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1]))
    return x.view(torch.int64) if whole else x


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return `x[index]`, gathered in words of eight bytes where possible."""
    words = as_int64(x)
    return x[index] if words is x else words[index].view(x.dtype)


class Regroup(torch.autograd.Function):
    """`x[index]` for a permutation of the slots; the gradient uses the inverse permutation instead of a scatter sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return take(x, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return take(gradient, inverse), None, None


@dataclass(frozen=True)
class Segments:
    """Start of each of B queries in a packed batch of C copies and L text slots, as flash attention needs it."""

    copies: int  # C
    longest: tuple[int, int, int]  # upper bounds of the length of a query's copies, of its text, and of both
    copy_starts: Tensor  # (B + 1,) int32, into the copies
    text_starts: Tensor  # (B + 1,) int32, into the text slots
    key_starts: Tensor  # (B + 1,) int32, into `keys`
    keys: Tensor  # (N,) slots of the packed batch, query by query: copies, then text
    homes: Tensor  # (N,) the inverse of `keys`

    @classmethod
    def of(cls, copies: Sequence[int], texts: Sequence[int], device: torch.device) -> Segments:
        """Return the segments of a batch, from the numbers of copies and text slots of its queries."""
        starts, keys, homes = segment_numbers(copies, texts)
        copy_starts, text_starts, key_starts = (upload(row.astype(np.int32), device) for row in starts)
        longest = int(max(copies)), int(max(texts)), int(np.diff(starts[2]).max())
        return cls(
            int(starts[0, -1]), longest, copy_starts, text_starts, key_starts,
            upload(keys, device), upload(homes, device),
        )  # fmt: skip


def segment_numbers(copies: Sequence[int], texts: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `Segments` needs to know of B queries with these numbers of copies and text slots.

    Returns:
        (3, B + 1) where queries begin among the copies, among the text slots and in `Segments.keys`; then `keys` and
        `homes`, (N,) each.
    """
    lengths = np.array([copies, texts, np.add(copies, texts)])
    starts = np.pad(lengths.cumsum(1), ((0, 0), (1, 0)))
    copy_starts, text_starts, key_starts = starts[:, :-1]
    moves = np.concatenate([key_starts - copy_starts, key_starts + lengths[0] - text_starts - starts[0, -1]])
    homes = np.arange(starts[2, -1]) + moves.repeat(lengths[:2].ravel())
    keys = np.empty_like(homes)
    keys[homes] = np.arange(len(homes))
    return starts, keys, homes


class Packed:
    """Base of the backends that work on the packed batch directly."""

    def __init__(self, layout: Layout | Segments) -> None:
        self.calls = 0
        if isinstance(layout, Segments):
            self.segments = layout
        else:
            self.segments = Segments.of(layout.copies, layout.texts, layout.ids.device)


class Varlen(Packed):
    """Two flash attention calls over the packed batch.

    Copies attend to copies; text attends to `[copies, text]` under a causal mask aligned at the bottom right.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))  # (N, heads, D); rotary may return fp32
        copies, copy_starts, text_starts = self.segments.copies, self.segments.copy_starts, self.segments.text_starts
        # With a bound of 1 torch assumes that every query has exactly one slot, even those that have none.
        longest_copies, longest_text, longest_keys = (max(2, bound) if bound else 0 for bound in self.segments.longest)
        if not copies:
            return flash(
                q, k, v, text_starts, text_starts, longest_text, longest_text, scale=scale, window_size=(-1, 0)
            )[None]
        if not longest_text:
            return flash(q, k, v, copy_starts, copy_starts, longest_copies, longest_copies, scale=scale)[None]
        keys, values = (
            cast(Tensor, Regroup.apply(x, self.segments.keys, self.segments.homes))  # type: ignore[no-untyped-call]
            for x in (k, v)
        )
        text_out = flash(
            q[copies:], keys, values, text_starts, self.segments.key_starts,
            longest_text, longest_keys, scale=scale, window_size=(-1, 0),
        )  # fmt: skip
        q, k, v = q[:copies], k[:copies], v[:copies]
        copies_out = flash(q, k, v, copy_starts, copy_starts, longest_copies, longest_copies, scale=scale)
        return torch.cat([copies_out, text_out])[None]  # (1, N, H, D)


class Fused(Packed):
    """Triton kernels for this mask (see `kernels`): one pass over copies and text, without moving them."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        segments = self.segments
        q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))  # (N, heads, D); rotary may return fp32
        longest_copies, longest_text, _ = segments.longest
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return kernels.attention(
            q, k, v, segments.copy_starts, segments.text_starts, segments.copies, longest_copies, longest_text, scale
        )[None]  # fmt: skip


class Cached:
    """One decoding step: the query at slot s of a row attends to slots 0 … s of that row's cache."""

    def __init__(self, slots: Tensor, capacity: int, dtype: torch.dtype) -> None:
        self.calls = 0
        hidden = torch.arange(capacity, device=slots.device) > slots[:, None, :, None]  # (R, 1, W, capacity)
        # Additive and in the model's dtype, built once a step: every layer would convert a boolean mask to this.
        mask = torch.zeros(hidden.shape, dtype=dtype, device=slots.device).masked_fill_(hidden, float("-inf"))
        self.masks = {1: mask}  # by number of query heads per key head

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        rows, heads, width, dim = q.shape
        groups = heads // k.shape[1]
        # Query heads that share a key head become more queries of that head, so that the cache is not repeated.
        q = q.to(v.dtype).reshape(rows, k.shape[1], groups * width, dim)
        if groups not in self.masks:  # in the first layer
            self.masks[groups] = self.masks[1].repeat(1, 1, groups, 1)
        out = F.scaled_dot_product_attention(q, k.to(v.dtype), v, attn_mask=self.masks[groups], scale=scale)
        return out.reshape(rows, heads, width, -1).transpose(1, 2).contiguous()  # some networks view it


class Ragged:
    """Like `Cached`, with a kernel that reads each row's cache only up to its length (see `decode_kernel`)."""

    def __init__(self, slots: Tensor, spare: int) -> None:
        self.calls = 0
        self.slots, self.spare = slots, spare  # (R, W); a query at the spare slot or beyond is padding

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return decode_kernel.attention(q.to(v.dtype), k, v, self.slots, self.spare, scale)


BACKENDS: dict[str, type[Dense | Varlen | Fused]] = {"dense": Dense, "varlen": Varlen, "fused": Fused}


def flash(*args: Any, **kwargs: Any) -> Tensor:
    """Call torch's variable-length flash attention."""
    return cast(Tensor, varlen_attn(*args, **{**SHARED_HEADS, **kwargs}))  # a tuple only with return_aux


def possible_backends(model: PreTrainedModel) -> list[str]:
    """Return the backends that are exact for this model on its device, the default first.

    The fused kernels are the fastest but are compiled on first use, so they are used in training, by calls that score
    many texts (see `Engine.scoring_backend`) or on request.
    (The kernel for decoding steps, see `can_decode_ragged`, is compiled whenever samples are drawn.)
    """
    config = model.config.get_text_config()
    head_dim = head_width(config)
    half = model.dtype in (torch.bfloat16, torch.float16)
    plain = head_dim % 8 == 0 and head_dim <= 256 and getattr(config, "v_head_dim", head_dim) == head_dim
    if model.device.type != "cuda" or not half or not plain:
        return ["dense"]
    return ["varlen", "dense", *(["fused"] if kernels.available() and head_dim in kernels.HEAD_DIMS else [])]


def head_width(config: Any) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def can_decode_ragged(model: PreTrainedModel) -> bool:
    """Return whether decoding steps can use `Ragged`; the first call tries the kernel on the device."""
    if "fused" not in possible_backends(model):
        return False
    return decode_kernel.works(model.device, head_width(model.config.get_text_config()), model.dtype)


def can_fuse(model: PreTrainedModel) -> bool:
    """Return whether `Fused` can be used; the first call compiles its forward kernel and tries it on the device."""
    if "fused" not in possible_backends(model):
        return False
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return kernels.works(model.device, heads, key_heads, head_width(config), model.dtype)


def choose_backend(model: PreTrainedModel) -> str:
    """Return the default backend for queries: "varlen" for half precision on CUDA, else "dense"."""
    return possible_backends(model)[0]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the backend of this call, or with `sdpa` if there is none; registered in transformers."""
    backend: Backend | None = kwargs.pop(NAME, None)
    if backend is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelError(BOTH_WAYS)
    added = [name for name in OWN_ADDITIONS if kwargs.get(name) is not None]
    if attention_mask is not None and attention_mask.shape != (1, 1, 1, 1):  # not the one that `run` passed
        added.append("a mask of its own")
    if added:
        raise ModelError(
            f"its attention uses {', '.join(added)}, which acgpt's would leave out. Use a model with plain softmax "
            "attention in every layer."
        )
    if dropout and not isinstance(backend, Dense):  # others would ignore it
        raise ModelError("this backend has no dropout of attention weights: use the dense one, or no dropout there.")
    if not torch.compiler.is_compiling():  # a counter would make torch.compile recompile each layer
        backend.calls += 1
    return backend(query, key, value, scaling, dropout), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without a backend


def run(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    backend: Backend,
    keep: Tensor | int,
    cache: Any = None,
    target_positions: Tensor | None = None,
    *,
    hidden: bool = False,
) -> Tensor:
    """Run one forward pass of the model under `backend` and return the logits at the slots `keep`.

    Threads that share the model take turns.

    Args:
        model: A causal language model that `check_model` has accepted.
        ids: (rows, slots) token ids.
        positions: (rows, slots) position ids.
        backend: Attention under the layout's mask.
        keep: Slots to return logits for, or the number of last slots. The vocabulary projection runs on these only.
        cache: Keys and values of earlier calls, or a `Recorder` of this call's.
        target_positions: (rows, slots) the position that each slot predicts, for networks that take it as an input
            (`sigma_network`).
        hidden: Return the last hidden states instead of logits.

    Returns:
        (rows, kept slots, vocabulary) logits, or (rows, kept slots, width) hidden states.

    Raises:
        ModelError: Not every layer called the backend exactly once.
    """
    backend.calls = 0
    with turn(model):
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),  # passed through, not read
            "past_key_values": cache,
            "use_cache": cache is not None,
            NAME: backend,
        }
        if target_positions is not None:
            inputs["target_positions"] = target_positions
        if hidden:
            logits: Tensor = model.base_model(**inputs).last_hidden_state[:, keep]
        else:
            logits = model(**inputs, logits_to_keep=keep).logits
    layers = model.config.get_text_config().num_hidden_layers
    if backend.calls != layers and not (model.config._attn_implementation == NAME and is_compiled(model)):
        raise ModelError(miscount(model, backend.calls, layers))
    count = keep if isinstance(keep, int) else len(keep)
    if logits.shape[1] != count:  # an architecture that ignores `logits_to_keep`
        logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
    return logits


def miscount(model: PreTrainedModel, calls: int, layers: int) -> str:
    """Return an error message for a model whose number of attention calls is not its number of layers."""
    if (now := model.config.get_text_config()._attn_implementation) != NAME:
        return (
            f"{type(model).__name__} used acgpt's attention in {calls} of its {layers} layers: its attention "
            f"implementation is now {now!r}. Set it to {NAME!r} again."
        )
    if not calls:
        return OWN_ATTENTION
    return (
        f"it calls attention {calls} times for its {layers} layers, which is not one softmax attention a layer. Use a "
        "model in which every layer has full attention."
    )
