"""The optimizer and the schedule of its learning rate.

AdamW for everything; or Muon (`torch.optim.Muon`) for the weight matrices of the blocks and AdamW for the rest:
embeddings, which are tables rather than maps, biases and norms. Only matrices decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Joined(torch.optim.Optimizer):
    """Several optimizers, each with parameters of its own, as one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all of them, the very objects, so that a schedule reaches each."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """What they remember of each parameter."""
        return {parameter: held for optimizer in self.optimizers for parameter, held in optimizer.state.items()}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Let each take its step."""
        assert closure is None
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of all, in order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)


class Muon(torch.optim.Muon):
    """torch's Muon for all matrices of a shape at once: the same update, to rounding; depth adds no launches."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Momentum, orthogonalisation, weight decay, step."""
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
                held = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
                torch._foreach_lerp_(held, gradients, 1 - group["momentum"])
                updates = torch._foreach_lerp(gradients, held, group["momentum"]) if group["nesterov"] else held
                turned = orthogonalise(torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"])
                scale = 0.2 * math.sqrt(max(shape))  # adjust_lr_fn="match_rms_adamw"
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(turned.to(parameters[0].dtype)), alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """(n, rows, columns) the nearest orthogonal matrices, roughly: Newton–Schulz as in torch's Muon, bf16 on a GPU."""
    a, b, c = coefficients
    wide = matrices.shape[1] <= matrices.shape[2]
    # On a CPU that has no bf16, a product in it makes torch do without oneDNN for the rest of the process: the steps of
    # a run would be rounded otherwise before it than after it, and so would those of a run that is taken up again.
    x = (matrices if wide else matrices.mT).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def build_optimizer(
    model: PreTrainedModel,
    *,
    muon: bool,
    lr: float,
    muon_lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """The optimizer of a model's parameters.

    Args:
        model: A causal language model.
        muon: Muon for the matrices of the blocks.
        lr: AdamW's learning rate.
        muon_lr: Muon's, on AdamW's scale: a matrix moves as far as AdamW would with this rate (`match_rms_adamw`).
        betas: AdamW's.
        weight_decay: Decoupled; of matrices, and with Muon of those of the blocks only.
    """
    tables = {id(parameter) for table in embeddings(model) for parameter in table.parameters()}
    matrices: list[Tensor] = []
    decayed: list[Tensor] = []
    rest: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim == 2
            (rest if not matrix else matrices if muon and id(parameter) not in tables else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.0 if muon else weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups, fused = [group for group in groups if group["params"]], model.device.type == "cuda"
    adamw = [torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)] if groups else []  # an adapter is all matrices
    if not muon:
        return adamw[0]
    return Joined([*adamw, Muon(matrices, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")])


def embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """The tables of a model: all its embeddings, of tokens or positions, and its vocabulary projection."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]


def rate(step: int, *, steps: int, warmup: int, shape: str, final: float, cooldown: float) -> float:
    """The learning rate of a step (from 0) as a share of its peak.

    Args:
        step: Which step.
        steps: How many there are.
        warmup: Linear from nothing over so many steps.
        shape: "cosine" falls along half a wave; "linear" stays, then falls in a straight line; "constant" stays.
        final: The share towards which it falls.
        cooldown: The last share of the steps after warm-up, over which "linear" falls; 1 is all of them.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if shape == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * min(1.0, done))) / 2
    if shape == "linear":
        return final + (1 - final) * min(1.0, max(0.0, 1 - done) / cooldown)
    return 1.0
