"""Attention: one function, registered with transformers, through which every architecture gets the layout's mask.

The layout reaches it untouched as the keyword `acgpt` of the model's forward. What travels is a *backend*, a callable
`(q, k, v, scale) -> out` that knows who may see whom:

    Dense    any device and dtype; a boolean mask over a padded rectangle. The reference, and the CPU path.
    Varlen   CUDA, bf16 and fp16; two flash calls over the packed batch, no mask and no padding.
    Fused    CUDA, bf16 and fp16; kernels of our own for this mask, compiled on first use. For training.
    Cached   one step of decoding: rows of different lengths against their key-value caches (see `decode`).
    Ragged   the same on CUDA, bf16 and fp16; a kernel of our own that reads no more of a row than it has.

Outside acgpt's own calls, where no backend is passed, the registered function behaves as transformers' `sdpa`, so a
model that acgpt has been given still works everywhere else.

Three ways in which a model could silently be shown another mask are closed in `run`, and each has a test: transformers'
guess that a jump in position ids is a boundary between packed documents (a 4-D mask is always passed, which switches
the guess off), an attention implementation that was changed behind our back (every layer must have called us; of a
compiled network, whose layers cannot count, the implementation's name is looked at), and layers with a mask of their
own such as sliding windows (refused by `check_model`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from acgpt.engine.architecture import apart, objection, plain_logits, tolerance_of
from acgpt.engine.kernels import attention as kernels
from acgpt.engine.kernels import decode as decode_kernel
from acgpt.engine.layout import Layout, upload, visible
from acgpt.engine.locks import turn
from acgpt.errors import ModelError

NAME = "acgpt"  # the attention implementation's name in transformers, and the keyword that carries the backend
# Newer versions of torch want to be told of grouped-query attention.
SHARED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
# What an architecture may add to attention and we would leave out.
OWN_ADDITIONS = ("sliding_window", "softcap", "s_aux", "position_bias", "indices", "block_indices")
OWN_ATTENTION = (
    "its code computes attention itself, not through transformers' attention interface. Use a model that does, such as "
    "Llama, Qwen3 or GPT-NeoX."
)
BOTH_WAYS = (
    "it reads a text both ways, so it is no causal model. If it was trained as one, set is_decoder to true in "
    "config.json."
)
FAR = 2**20  # slots: more than any temperature or window waits for


class Backend(Protocol):
    """Attention for one forward pass. `calls` counts the layers that used it."""

    calls: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        """(rows, heads, slots, D) queries, keys and values in; (rows, slots, heads, D) out."""
        ...


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


def refuse_dropout(dropout: float) -> None:
    """Only the dense mask has dropout of attention weights; elsewhere it would silently be left out."""
    if dropout:
        raise ModelError("this backend has no dropout of attention weights: use the dense one, or no dropout there.")


def words(x: Tensor) -> Tensor:
    """The same memory in words of eight bytes, where its last dimension is made of such.

    A GPU moves a row of half-precision numbers by an index faster in such words than number by number. Where this is
    compiled, that is the compiler's business; and words have no gradient.
    """
    differentiated = torch.is_grad_enabled() and x.requires_grad
    if torch.compiler.is_compiling() or differentiated or x.device.type not in ("cpu", "cuda"):
        return x
    per_word = 8 // x.element_size()
    whole = x.stride(-1) == 1 and all(n % per_word == 0 for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1]))
    return x.view(torch.int64) if whole else x


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[index], for rows of numbers."""
    moved = words(x)
    return x[index] if moved is x else moved[index].view(x.dtype)


class Regroup(torch.autograd.Function):
    """x[index] for a permutation of the slots, whose gradient is the inverse permutation and not a sum over indices."""

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
    """Where each of B queries begins in a packed batch of C copies and L text slots: all that flash attention needs."""

    copies: int  # C
    longest: tuple[int, int, int]  # bounds of a query's copies, of its text, and of both together
    copy_starts: Tensor  # (B + 1,) int32, into the copies
    text_starts: Tensor  # (B + 1,) int32, into the text slots
    key_starts: Tensor  # (B + 1,) int32, into `keys`
    keys: Tensor  # (N,) the packed batch, query by query: copies, then text
    homes: Tensor  # (N,) the inverse of `keys`

    @classmethod
    def of(cls, copies: Sequence[int], texts: Sequence[int], device: torch.device) -> Segments:
        """The segments of a batch whose queries have so many copies and text slots."""
        lengths = np.array([copies, texts])

        def starts(lengths: np.ndarray) -> Tensor:
            return upload(np.concatenate(([0], lengths.cumsum())).astype(np.int32), device)

        own = lengths.cumsum(1) - lengths  # where the copies of a query begin among all copies, and its text likewise
        query = lengths.sum(0).cumsum(0) - lengths.sum(0)  # where a query begins in `keys`
        moves = np.concatenate([query - own[0], query + lengths[0] - own[1] - lengths[0].sum()])
        homes = np.arange(lengths.sum()) + moves.repeat(lengths.ravel())
        keys = np.empty_like(homes)
        keys[homes] = np.arange(len(homes))
        longest = int(lengths[0].max()), int(lengths[1].max()), int(lengths.sum(0).max())
        return cls(
            int(lengths[0].sum()), longest, starts(lengths[0]), starts(lengths[1]), starts(lengths.sum(0)),
            upload(keys, device), upload(homes, device),
        )  # fmt: skip


class Packed:
    """A backend that works on the packed batch as it is."""

    def __init__(self, layout: Layout | Segments) -> None:
        self.calls = 0
        if isinstance(layout, Segments):
            self.segments = layout
        else:
            self.segments = Segments.of(layout.copies, layout.texts, layout.ids.device)


class Varlen(Packed):
    """Two flash calls over the packed batch: copies see copies; text sees `[copies, text]`, causal, bottom-right."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        refuse_dropout(dropout)
        at = self.segments
        q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))  # (N, heads, D); rotary may return fp32
        # A bound of 1 would make torch take every query for one that has exactly one slot, also those that have none.
        longest_copies, longest_text, longest_keys = (max(2, longest) if longest else 0 for longest in at.longest)
        if not at.copies:
            return flash(
                q, k, v, at.text_starts, at.text_starts, longest_text, longest_text, scale=scale, window_size=(-1, 0)
            )[None]
        if not longest_text:
            return flash(q, k, v, at.copy_starts, at.copy_starts, longest_copies, longest_copies, scale=scale)[None]
        keys, values = (cast(Tensor, Regroup.apply(x, at.keys, at.homes)) for x in (k, v))  # type: ignore[no-untyped-call]
        seen_by_text = flash(
            q[at.copies :], keys, values, at.text_starts, at.key_starts,
            longest_text, longest_keys, scale=scale, window_size=(-1, 0),
        )  # fmt: skip
        q, k, v = q[: at.copies], k[: at.copies], v[: at.copies]
        seen_by_copies = flash(q, k, v, at.copy_starts, at.copy_starts, longest_copies, longest_copies, scale=scale)
        return torch.cat([seen_by_copies, seen_by_text])[None]  # (1, N, H, D)


class Fused(Packed):
    """Kernels made for this mask (see `kernels`): one pass over copies and text where they lie."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        refuse_dropout(dropout)
        at = self.segments
        q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))  # (N, heads, D); rotary may return fp32
        longest_copies, longest_text, _ = at.longest
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return kernels.attention(
            q, k, v, at.copy_starts, at.text_starts, at.copies, longest_copies, longest_text, scale
        )[None]  # fmt: skip


class Cached:
    """A step of decoding: the query at slot s of a row sees slots 0 … s of that row's cache."""

    def __init__(self, slots: Tensor, capacity: int, dtype: torch.dtype) -> None:
        self.calls = 0
        hidden = torch.arange(capacity, device=slots.device) > slots[:, None, :, None]  # (R, 1, W, capacity)
        # Additive and in the model's dtype, once a step: a boolean mask would be turned into this by every layer.
        self.mask = torch.zeros(hidden.shape, dtype=dtype, device=slots.device).masked_fill_(hidden, float("-inf"))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        refuse_dropout(dropout)
        rows, heads, width, dim = q.shape
        groups = heads // k.shape[1]
        # Query heads that share a key head become more queries of it: the cache is read once, and never repeated.
        q = q.to(v.dtype).reshape(rows, k.shape[1], groups * width, dim)
        mask = self.mask.repeat(1, 1, groups, 1) if groups > 1 else self.mask
        out = F.scaled_dot_product_attention(q, k.to(v.dtype), v, attn_mask=mask, scale=scale)
        return out.reshape(rows, heads, width, -1).transpose(1, 2).contiguous()  # some networks view it


class Ragged:
    """As `Cached`, by a kernel that reads of each row's cache as much as that row has (see `decode_kernel`)."""

    def __init__(self, slots: Tensor, spare: int) -> None:
        self.calls = 0
        self.slots, self.spare = slots, spare  # (R, W); at the spare slot, and beyond, a query is none

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        refuse_dropout(dropout)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return decode_kernel.attention(q.to(v.dtype), k, v, self.slots, self.spare, scale)


BACKENDS: dict[str, type[Dense | Varlen | Fused]] = {"dense": Dense, "varlen": Varlen, "fused": Fused}


def flash(*args: Any, **kwargs: Any) -> Tensor:
    """torch's variable-length flash attention."""
    return cast(Tensor, varlen_attn(*args, **{**SHARED_HEADS, **kwargs}))  # a tuple only if one is asked for


def possible_backends(model: PreTrainedModel) -> list[str]:
    """The backends that are exact for this model where it is, the first choice first.

    The fused kernels are the fastest, but are compiled on first use: that is for training, and for those who ask. (The
    one for steps of decoding, see `can_decode_ragged`, is compiled for all who sample.)
    """
    config = model.config.get_text_config()
    head_dim = head_width(config)
    half = model.dtype in (torch.bfloat16, torch.float16)
    plain = head_dim % 8 == 0 and head_dim <= 256 and getattr(config, "v_head_dim", head_dim) == head_dim
    if model.device.type != "cuda" or not half or not plain:
        return ["dense"]
    return ["varlen", "dense", *(["fused"] if kernels.available() and head_dim in kernels.HEAD_DIMS else [])]


def head_width(config: Any) -> int:
    """The width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def can_decode_ragged(model: PreTrainedModel) -> bool:
    """May steps of decoding go through `Ragged`? Tried on the device when it is first asked."""
    if "fused" not in possible_backends(model):
        return False
    return decode_kernel.works(model.device, head_width(model.config.get_text_config()), model.dtype)


def choose_backend(model: PreTrainedModel) -> str:
    """The backend for questions: "varlen" for half precision on CUDA, else "dense"."""
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
    """The registered attention function: hands over to the backend of this call; plain `sdpa` where there is none."""
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
    if not torch.compiler.is_compiling():  # `run` is not compiled; a number that changes would compile each layer anew
        backend.calls += 1
    return backend(query, key, value, scaling, dropout), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls from outside: they get the masks of `sdpa`


def run(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    backend: Backend,
    keep: Tensor | int,
    cache: Any = None,
    target_positions: Tensor | None = None,
) -> Tensor:
    """One forward pass of the model under `backend`; logits at the slots `keep` alone.

    Threads that share the model take turns.

    Args:
        model: A causal language model that `check_model` has accepted.
        ids: (rows, slots) token ids.
        positions: (rows, slots) position ids.
        backend: Who sees whom.
        keep: The slots whose logits are wanted, or how many of the last ones: the vocabulary projection runs on
            these only.
        cache: Keys and values of earlier calls, or a recorder of this one's.
        target_positions: (rows, slots) the position that each slot predicts, for a network that is told it
            (`sigma_network`).

    Returns:
        (rows, kept slots, vocabulary) logits.
    """
    backend.calls = 0
    with turn(model):
        logits: Tensor = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),  # 4-D: taken as is, never read
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
            **{NAME: backend},
            **({} if target_positions is None else {"target_positions": target_positions}),
        ).logits
    layers = model.config.get_text_config().num_hidden_layers
    if backend.calls != layers and not (model.config._attn_implementation == NAME and is_compiled(model)):
        raise ModelError(miscount(model, backend.calls, layers))
    kept = keep if isinstance(keep, int) else len(keep)
    if logits.shape[1] != kept:  # an architecture that ignores `logits_to_keep`
        logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
    return logits


def miscount(model: PreTrainedModel, calls: int, layers: int) -> str:
    """Why a model called attention another number of times than it has layers, and what to do."""
    if (now := model.config.get_text_config()._attn_implementation) != NAME:
        return (
            f"{type(model).__name__} put {calls} of its {layers} layers through acgpt's attention: its attention "
            f"implementation is now {now!r}. Set it to {NAME!r} again."
        )
    if not calls:
        return OWN_ATTENTION
    return (
        f"it calls attention {calls} times for its {layers} layers, which is not one softmax attention a layer. Use a "
        "model in which every layer has full attention."
    )


def blocks_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers that a network repeats, by the word of its class."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_blocks(model: PreTrainedModel) -> None:
    """Put a model's blocks through torch.compile from now on: they are alike, and compiled once for all of them."""
    if not (blocks := blocks_of(model)):
        raise ModelError(f"{type(model).__name__} does not say which blocks it consists of, and cannot be compiled.")
    with turn(model):
        for block in blocks:
            block.compile()


def is_compiled(model: PreTrainedModel) -> bool:
    """Has it gone through `compile_blocks`? Its layers then do not count their calls."""
    blocks = blocks_of(model)
    return bool(blocks) and all(block._compiled_call_impl is not None for block in blocks)


def check_model(model: PreTrainedModel) -> None:
    """Refuse, with the reason, a model whose answers would not be exact; then make `acgpt` its attention.

    Looks at the configuration first, then tries the model on a few tokens: six passes of at most two dozen. Neither
    depends on how large its weights are.
    """
    name = type(model).__name__
    if reason := objection(model):
        raise ModelError(f"{name} {reason}")
    with turn(model):
        own_attention = model.config._attn_implementation
        try:
            eager = torch.compiler.set_stance("force_eager")  # a compiled network would be compiled anew for each pass
            with torch.no_grad(), evaluating(model), matrix_products("highest"), eager:
                try_out(model)
        except Exception as error:  # whatever a network of another kind makes of such a call
            model.set_attn_implementation(own_attention)
            if isinstance(error, ModelError):
                reason = str(error)
            elif not model._supports_attention_backend:
                reason = OWN_ATTENTION
            else:
                reason = f"its code fails there ({type(error).__name__}: {error})."
            raise ModelError(f"{name} cannot be put through acgpt's attention: {reason}") from error


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """No dropout within; every module is left in the mode that it was in.

    Where several threads evaluate a model at once, the last to leave restores the modes.
    """
    with turn(model) as shared:
        shared.evaluating += 1
        shared.training += [module for module in model.modules() if module.training]
        model.eval()
    try:
        yield
    finally:
        with turn(model):
            shared.evaluating -= 1
            if not shared.evaluating:
                for module in shared.training:
                    module.training = True
                shared.training.clear()


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """Products of fp32 matrices on a GPU within: "highest" is fp32, "high" is TF32, several times as fast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Trace:
    """A backend that notes what each layer hands over to another one."""

    def __init__(self, backend: Backend) -> None:
        self.calls = 0
        self.backend = backend
        self.states: list[Tensor] = []  # queries, keys and values of each layer: (slots, numbers)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        # A step of decoding is handed the keys of all slots up to now: its own is the last.
        self.states += [x[0, :, -q.shape[2] :].transpose(0, 1).flatten(1) for x in (q, k, v)]
        return self.backend(q, k, v, scale, dropout)


class Claim(Cache):
    """The key-value cache of one row, which claims to have any length."""

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each layer: append, and hand back all there is."""
        if layer_idx in self.states:
            keys, values = self.states[layer_idx]
            key_states, value_states = torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)
        self.states[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """As claimed."""
        return self.length


def try_out(model: PreTrainedModel) -> None:
    """Show by trial that the model does what the layout takes for granted; sets its attention to `acgpt`.

    With nothing given it must agree with itself as it came. Copies are a set: given in another order, with the same
    positions, they must change nothing. A step of decoding must continue a pass. And the number of a slot, which grows
    with the batch and not with the text, must not matter.

    Differences are relative, and besides the logits everything that the layers hand to attention is compared: no
    weights are so small that they would hide one.
    """
    config = model.config.get_text_config()
    try:
        head_width(config)
    except Exception as unknown:
        raise ModelError(
            "its configuration names no width that all attention heads have. Use a model that has one, such as Llama, "
            "Qwen3 or GPT-NeoX."
        ) from unknown
    text = torch.arange(min(8, getattr(config, "max_position_embeddings", None) or 8), device=model.device)
    ids = text * 7919 % config.vocab_size  # by position
    plain = plain_logits(model, ids)
    own_attention = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise ModelError(OWN_ATTENTION)
    tolerance = tolerance_of(model)

    def states(positions: Tensor, backend: Backend, cache: Cache | None = None) -> list[Tensor]:
        """(slots, numbers) logits, and what each layer hands over."""
        trace = Trace(backend)
        logits = run(model, ids[positions][None], positions[None], trace, len(positions), cache)[0]
        return [logits, *trace.states]

    alone = states(text, Dense(laid_out([text[:0]], text)))
    if not (error := apart(alone[:1], [plain])) <= tolerance:
        raise ModelError(disagreement(model, ids, plain, own_attention, error))

    copies = text[1::2]
    orders = laid_out([copies, copies.flip(0)], text)
    both = states(orders.positions, Dense(orders))
    packed, _ = orders.rectangle()
    first, second = (upload(slots, model.device) for slots in packed)
    second = torch.cat([second[: len(copies)].flip(0), second[len(copies) :]])
    given = [x[first] for x in both]
    if not (error := apart([x[second] for x in both], given)) <= tolerance:
        raise ModelError(
            f"it heeds the order of copies, not their positions alone (relative difference {error:.2g}). Use a model "
            "that takes every position from position_ids."
        )

    positions, slots = orders.positions[first], torch.arange(len(first), device=model.device)
    near, far, known = Claim(0), Claim(FAR), laid_out([copies], text[:-2])
    try:
        prefill = states(positions[:-2], Dense(known), near)
        step = states(positions[-2:], Cached(slots[None, -2:], len(slots), alone[-1].dtype), near)
    except Exception as own_cache:
        raise ModelError(
            "it takes no key-value cache but its own, so nothing could be sampled from it. Use a model that takes "
            "one, such as Llama, Qwen3 or GPT-NeoX."
        ) from own_cache
    if not (error := apart([torch.cat(pair) for pair in zip(prefill, step, strict=True)], given)) <= tolerance:
        raise ModelError(
            f"a step of decoding does not continue its passes (relative difference {error:.2g}): its layers keep more "
            "than keys and values. Use a model in which every layer has full attention."
        )
    if not (error := apart(states(positions[:-2], Dense(known), far), prefill)) <= tolerance:
        raise ModelError(
            f"it heeds the number of a slot, not its position alone (relative difference {error:.2g} after {FAR:,} "
            "slots). Use a model that takes every position from position_ids."
        )


def laid_out(copies: Sequence[Tensor], text: Tensor) -> Layout:
    """A layout of one text, once with each of several sequences of copies; its ids are positions."""
    positions = torch.cat([*copies, *[text] * len(copies)])
    counts, texts = tuple(map(len, copies)), (len(text),) * len(copies)
    rows = torch.arange(sum(counts), len(positions), device=text.device)
    return Layout(positions, positions, counts, texts, rows, positions[rows], texts)


def disagreement(model: PreTrainedModel, ids: Tensor, plain: Tensor, own_attention: str, error: float) -> str:
    """Why a model to which nothing is given may answer otherwise than by itself, and what to do."""
    model.set_attn_implementation(own_attention)
    tolerance, positions = tolerance_of(model), torch.arange(len(ids), device=ids.device)
    if not apart([plain_logits(model, ids, position_ids=positions[None])], [plain]) <= tolerance:
        return (
            "it does not number positions 0, 1, 2, … (RoBERTa begins after its padding token). Use a model that does, "
            "such as Llama, Qwen3 or GPT-NeoX."
        )
    changed = plain_logits(model, torch.cat([ids[:-1], ids[:1]]))
    if not apart([changed[:-1]], [plain[:-1]]) <= tolerance:
        return BOTH_WAYS
    return (
        f"with nothing given it answers otherwise than by itself (relative difference {error:.2g}): its own attention "
        "does something that would be left out. Use another model."
    )
