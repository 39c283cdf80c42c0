"""The attention kernels: exactness and speed against two variable-length flash calls, and a sweep of block sizes.

    python benchmarks/attention_kernel.py
    python benchmarks/attention_kernel.py --texts 48 --no-sweep

A batch as in training: texts of 1,023 slots with c copies each, c uniform up to 0.6 of the text, and one-slot dummies.
Errors are ‖x − reference‖ / ‖reference‖ against float32 under a dense mask. TFLOP/s count the pairs of slots of which
one attends to the other: 4 operations per pair and channel forward, 10 backward. In the checks, memory that no kernel
writes is NaN.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Callable

import torch
from common import machine, report
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from acgpt.engine.attention import Segments, Varlen
from acgpt.engine.kernels import attention as kernels
from acgpt.engine.layout import visible

# (BLOCK_M, BLOCK_N, num_warps, num_stages); rows by keys
SWEEP = {
    "forward": [
        (128, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
        (64, 64, 4, 2), (64, 128, 4, 3), (128, 32, 4, 3),
    ],
    "backward_query": [
        (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 2), (128, 128, 8, 2),
        (64, 128, 4, 2), (64, 32, 4, 3),
    ],
    "backward_key": [
        (64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 2), (32, 128, 8, 3),
        (32, 128, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (128, 64, 4, 2),
    ],
}  # fmt: skip
NAMES = ("out", "dq", "dk", "dv")


class Case:
    """A batch with q and k as rotary embeddings leave them (heads before slots), and v a part of a fused projection."""

    def __init__(self, copies: list[int], texts: list[int], heads: int, key_heads: int, dim: int) -> None:
        torch.manual_seed(0)
        self.copies, self.texts, self.shape = copies, texts, (heads, key_heads, dim)
        self.slots, self.scale = sum(copies) + sum(texts), dim**-0.5

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        q, k = (draw(n, self.slots, dim).transpose(0, 1) for n in (heads, key_heads))
        v = draw(self.slots, key_heads, 3 * dim)[..., 2 * dim :]
        self.qkv = [x.detach().requires_grad_() for x in (q, k, v)]
        self.dout = draw(self.slots, heads, dim)
        self.segments = Segments.of(copies, texts, torch.device("cuda"))
        segments = self.segments
        self.segment_arguments = segments.copy_starts, segments.text_starts, segments.copies, *segments.longest[:2]
        self.pairs = sum(c * c + t * c + t * (t + 1) / 2 for c, t in zip(copies, texts, strict=True))

    def kernel(self) -> Tensor:
        return kernels.attention(*self.qkv, *self.segment_arguments, self.scale)

    def varlen(self) -> Tensor:
        return Varlen(self.segments)(*(x.transpose(0, 1)[None] for x in self.qkv), self.scale)[0]

    def with_gradients(self, attend: Callable[[], Tensor]) -> list[Tensor]:
        out = attend()
        return [out.detach(), *torch.autograd.grad(out, self.qkv, self.dout)]

    def reference(self) -> list[Tensor]:
        heads, key_heads, _ = self.shape
        results = [torch.empty(x.shape, device="cuda") for x in (self.dout, *self.qkv)]
        copy, text = 0, sum(self.copies)
        for c, t in zip(self.copies, self.texts, strict=True):
            index = torch.cat([torch.arange(copy, copy + c), torch.arange(text, text + t)]).cuda()
            copy, text = copy + c, text + t
            leaves = [x.detach()[index].float().requires_grad_() for x in self.qkv]
            q, k, v = (x.transpose(0, 1)[None] for x in leaves)
            k, v = (x.repeat_interleave(heads // key_heads, dim=1) for x in (k, v))
            mask = visible(torch.tensor([c], device="cuda"), c + t)
            with sdpa_kernel(SDPBackend.MATH):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
            out = out[0].transpose(0, 1)
            gradients = torch.autograd.grad(out, leaves, self.dout[index].float())
            for result, part in zip(results, (out.detach(), *gradients), strict=True):
                result[index] = part
        return results


def training_case(texts: int, length: int) -> Case:
    rng = random.Random(0)
    copies = [round(rng.uniform(0, 0.6 * length)) for _ in range(texts)]
    dummies = -(texts * length) % 128 or 128
    spare = -sum(copies) % 128
    copies += [spare // dummies + (i < spare % dummies) for i in range(dummies)]
    return Case(copies, [length] * texts + [1] * dummies, 12, 12, 64)


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median device time of a call."""
    for _ in range(3):
        work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def errors(case: Case) -> dict[str, dict[str, float]]:
    """Return the relative errors of both implementations, by tensor."""
    expected, relative_errors = case.reference(), {}
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    from_kernel = case.with_gradients(case.kernel)
    torch.use_deterministic_algorithms(False)
    for name, results in {"kernel": from_kernel, "varlen": case.with_gradients(case.varlen)}.items():
        pairs = zip(NAMES, results, expected, strict=True)
        relative_errors[name] = {tensor: ((x.float() - y).norm() / y.norm()).item() for tensor, x, y in pairs}
    return relative_errors


def sweep(case: Case, name: str) -> list[tuple[float, tuple[int, ...]]]:
    """Return the milliseconds of one kernel under each tuning, the fastest first."""
    q, k, v = (x.detach() for x in case.qkv)
    out, lse = kernels.attention_forward(q, k, v, *case.segment_arguments, case.scale)
    delta = (out.float() * case.dout.float()).sum(2).T.contiguous()
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in case.qkv)
    kernel, tensors, strided = {
        "forward": (kernels.forward_kernel, [q, k, v, out, lse], [q, k, v]),
        "backward_query": (
            kernels.backward_query_kernel, [q, k, v, out, case.dout, lse, delta, dq], [q, k, v, case.dout],
        ),
        "backward_key": (kernels.backward_key_kernel, [q, k, v, case.dout, lse, delta, dk, dv], [q, k, v, case.dout]),
    }[name]  # fmt: skip
    copy_starts, text_starts, copies, *longest = case.segment_arguments
    scale2 = case.scale * 1.4426950408889634
    scales = (scale2,) if name == "forward" else (case.scale, scale2)
    default, timings = kernels.TUNING[name][case.shape[2]], []
    for choice in SWEEP[name]:
        parts = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), choice, strict=True))
        kernels.TUNING[name][case.shape[2]] = parts

        def work() -> None:
            kernels.launch(
                name, kernel, tensors, strided, copy_starts, text_starts, copies, tuple(longest), scales, case.shape
            )

        try:
            timings.append((milliseconds(work, 10), choice))
            print(f"{name} {choice}: {timings[-1][0]:.3f} ms", flush=True)
        except Exception as error:  # too much shared memory, for example: go on with the others
            print(f"{name} {choice}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    kernels.TUNING[name][case.shape[2]] = default
    return sorted(timings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[64, 48])
    parser.add_argument("--length", type=int, default=1023)
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    if not kernels.available():
        raise SystemExit("this benchmark needs Triton and a CUDA device of capability 8.0 or higher")
    cases = {f"{texts} texts": training_case(texts, args.length) for texts in args.texts}
    small = [300, 0, 128, 7, 2], [513, 64, 128, 300, 1]
    small_cases = {f"{h}/{k} heads × {d}": Case(*small, h, k, d) for h, k, d in ((12, 4, 64), (4, 2, 128), (4, 4, 32))}

    rows, exactness = [], {}
    for name, case in {**small_cases, **cases}.items():
        exactness[name] = errors(case)
        for path, by_tensor in exactness[name].items():
            rows.append([name, path, *(f"{by_tensor[tensor]:.2e}" for tensor in NAMES)])
            print(*rows[-1], sep="  ", flush=True)
    torch.cuda.empty_cache()

    timing: dict[str, dict[str, dict[str, float]]] = {}
    for name, case in cases.items():
        operations = case.pairs * case.shape[0] * case.shape[2]
        for path, attend in {"kernel": case.kernel, "varlen": case.varlen}.items():
            out = attend()

            def gradients(out: Tensor = out, case: Case = case) -> object:
                return torch.autograd.grad(out, case.qkv, case.dout, retain_graph=True)

            ms = {"forward": milliseconds(attend), "backward": milliseconds(gradients)}
            rates = {
                "forward": 4 * operations / ms["forward"] / 1e9,
                "backward": 10 * operations / ms["backward"] / 1e9,
            }
            timing.setdefault(name, {})[path] = {f"{which}_ms": t for which, t in ms.items()}
            timing[name][path] |= {f"{which}_tflops": rate for which, rate in rates.items()}
            cells = itertools.chain(*((f"{ms[which]:.3f} ms", f"{rates[which]:.0f} TFLOP/s") for which in ms))
            rows.append([name, path, *cells])
            print(*rows[-1], sep="  ", flush=True)

    best = {}
    if args.sweep:
        for kernel in SWEEP:
            best[kernel] = sweep(next(iter(cases.values())), kernel)[:3]
            rows += [["best " + kernel, str(choice), f"{ms:.3f} ms", "", "", ""] for ms, choice in best[kernel]]
    record = {
        "benchmark": "attention_kernel", **vars(args), **machine("cuda"), "relative_errors": exactness,
        "timing": timing, "tuning": kernels.TUNING, "best": best,
    }  # fmt: skip
    columns = ["", "path", "out, or forward", "dq, or rate", "dk, or backward", "dv, or rate"]
    report("Attention under the layout's mask, bf16, " + machine("cuda")["hardware"], columns, rows, record)


if __name__ == "__main__":
    main()
