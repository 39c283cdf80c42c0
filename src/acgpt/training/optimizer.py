"""The optimizer and the learning rate schedule.

AdamW for all weights; or Muon (`torch.optim.Muon`) for the weight matrices of the blocks and AdamW for the rest: the
embeddings, which are lookup tables rather than linear maps, the biases and the norms. Weight decay applies to matrices
only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Joined(torch.optim.Optimizer):
    """Several optimizers with disjoint parameters, combined into one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all optimizers: the objects themselves, so that a scheduler can change them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of every parameter."""
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Run a step of every optimizer."""
        assert closure is None
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers, in order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)


class Muon(torch.optim.Muon):
    """torch's Muon with all matrices of the same shape batched.

    The update is the same up to rounding, but the number of kernel launches does not grow with depth.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply momentum, orthogonalisation, weight decay and the update."""
        assert closure is None
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                for parameter in parameters:
                    if "momentum_buffer" not in self.state[parameter]:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                updates = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
                orthogonal = orthogonalise(
                    torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                scale = 0.2 * math.sqrt(max(shape))  # adjust_lr_fn="match_rms_adamw"
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(orthogonal.to(parameters[0].dtype)), alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return (n, rows, columns) approximately the nearest orthogonal matrices.

    This is the Newton–Schulz iteration of torch's Muon, in bf16 on a GPU.
    """
    a, b, c = coefficients
    wide = matrices.shape[1] <= matrices.shape[2]
    # On a CPU without bf16, a bf16 product makes torch disable oneDNN for the rest of the process. Steps before and
    # after it would be rounded differently, and a resumed run would differ from one that never stopped.
    x = (matrices if wide else matrices.mT).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def build_optimizer(
    model: PreTrainedModel,
    length_head: nn.Module | None = None,
    *,
    muon: bool,
    lr: float,
    muon_lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Build the optimizer of a model's parameters.

    Args:
        model: A causal language model.
        length_head: Its head for lengths of gaps, if it has one: with AdamW, without weight decay.
        muon: Whether to use Muon for the matrices of the blocks.
        lr: Learning rate of AdamW.
        muon_lr: Learning rate of Muon, on AdamW's scale: a matrix moves as far as with AdamW at this rate
            (`match_rms_adamw`).
        betas: Betas of AdamW.
        weight_decay: Decoupled weight decay of matrices; with Muon, only of the matrices of the blocks.
    """
    tables = {id(parameter) for table in embeddings(model) for parameter in table.parameters()}
    matrices: list[Tensor] = []
    decayed: list[Tensor] = []
    rest: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim == 2
            (rest if not matrix else matrices if muon and id(parameter) not in tables else decayed).append(parameter)
    if length_head is not None:
        rest += length_head.parameters()
    groups = [{"params": decayed, "weight_decay": 0.0 if muon else weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups, fused = [group for group in groups if group["params"]], model.device.type == "cuda"
    adamw = (
        [torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)] if groups else []
    )  # an adapter has only matrices
    if not muon:
        return adamw[0]
    return Joined([*adamw, Muon(matrices, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")])


def embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """Return the lookup tables of a model: its embeddings, of tokens or positions, and its vocabulary projection."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]


def rate(step: int, *, steps: int, warmup: int, shape: str, final: float, cooldown: float) -> float:
    """Return the learning rate of a step as a share of its peak.

    Args:
        step: Number of the step, from 0.
        steps: Number of steps of the run.
        warmup: Number of steps of linear warmup from 0.
        shape: "cosine" decays along half a cosine; "linear" is constant, then decays linearly; or "constant".
        final: Final share of the peak.
        cooldown: Share of the steps after warmup over which "linear" decays, at their end; 1 is all of them.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if shape == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * min(1.0, done))) / 2
    if shape == "linear":
        return final + (1 - final) * min(1.0, max(0.0, 1 - done) / cooldown)
    return 1.0
