"""Parameter groups of the optimizers, and the learning rate schedule."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from models import tiny_model

from acgpt.engine.peft import add_lora
from acgpt.methods.sigma_network import SigmaGPTForCausalLM
from acgpt.training.learner import new_model
from acgpt.training.optimizer import Muon, build_optimizer, orthogonalise, rate
from acgpt.training.recipe import Shape

RATES = {"lr": 1e-3, "muon_lr": 2e-2, "betas": (0.8, 0.9), "weight_decay": 0.3}


def small_model(seed=0):
    return new_model(Shape(2, 16, 2), vocabulary=32, positions=8, seed=seed)


def names_of(optimizer, model):
    """The names of an optimizer's parameters, group by group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def step(model, optimizer, seed):
    """Take a step on a loss that depends on every parameter."""
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 3].sum().neg().backward()
    optimizer.step()


# ---- who ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("network", [{}, *({"target_positions": kind} for kind in ("rotary", "table"))], ids=str)
def test_every_parameter_is_in_one_group_and_muon_has_the_matrices_of_the_blocks(muon, network):
    """Only matrices decay; with Muon, only its own. Tables of tokens and positions are AdamW's, the frozen nobody's."""
    kind = {"network": SigmaGPTForCausalLM} if network else {}
    model = new_model(Shape(2, 16, 2), vocabulary=32, positions=8, **kind, **network)
    model.gpt_neox.layers[0].requires_grad_(False)
    optimizer = build_optimizer(model, muon=muon, **RATES)
    found = [
        (name, type(each), group["lr"], group["weight_decay"], group.get("betas"))
        for each in (optimizer.optimizers if muon else [optimizer])
        for names, group in zip(names_of(each, model), each.param_groups, strict=True)
        for name in names
    ]
    expected = []
    for name, weight in model.named_parameters():
        if ".layers." in name and weight.ndim == 2 and muon:
            expected.append((name, Muon, 2e-2, 0.3, None))
        else:
            expected.append((name, torch.optim.AdamW, 1e-3, 0.0 if muon or weight.ndim == 1 else 0.3, (0.8, 0.9)))
    assert sorted(found, key=str) == sorted((row for row in expected if ".layers.0." not in row[0]), key=str)


@pytest.mark.parametrize("muon", [False, True])
def test_an_adapter_is_all_matrices(muon):
    model, _ = add_lora(tiny_model("llama", vocabulary=64), rank=2, alpha=4)
    optimizer = build_optimizer(model, muon=muon, **RATES)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {*map(id, held)} == {id(weight) for weight in model.parameters() if weight.requires_grad}
    before = [weight.clone() for weight in held]
    for weight in held:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert all((now != then).any() for now, then in zip(held, before, strict=True))


# ---- several as one -------------------------------------------------------------------------------------------------


def test_every_optimizer_takes_its_step_and_forgets_its_gradients():
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, muon=True, **RATES)
    step(model, optimizer, 0)
    assert all(not torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert set(optimizer.state) == set(model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- Muon -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_orthogonalised_matrices_are_nearly_orthogonal_and_keep_their_directions(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)) + 9 * torch.eye(*shape)
    turned = orthogonalise(matrices, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
    for matrix, result in zip(matrices, turned, strict=True):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        inside = left.T @ result @ right.T  # diagonal, near 1: the singular values, in the basis of the matrix
        values = inside.diagonal()
        assert ((values > 0.6) & (values < 1.3)).all()
        assert (inside - values.diag()).abs().max() < 0.1


def test_muon_moves_as_torchs_muon_does(monkeypatch):
    ours, theirs = small_model(), small_model()
    # As ours on a CPU, so that there is no rounding. Versions of torch write the conversion in different ways.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    pair = []
    for model, kind in ((ours, Muon), (theirs, torch.optim.Muon)):
        matrices = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]
        pair.append(kind(matrices, lr=2e-2, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"))
    before = copy.deepcopy(theirs.state_dict())
    for number in range(4):
        for model, optimizer in zip((ours, theirs), pair, strict=True):
            step(model, optimizer, number)
    for (name, one), (_, two) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        moved = two - before[name]
        assert (one - two).norm() <= 1e-4 * moved.norm(), name


# ---- the rate -------------------------------------------------------------------------------------------------------


def rates(shape, steps=10, warmup=2, final=0.1, cooldown=1.0):
    return [
        rate(number, steps=steps, warmup=warmup, shape=shape, final=final, cooldown=cooldown) for number in range(steps)
    ]


def test_the_rate_rises_in_a_straight_line_and_reaches_its_peak_after_warm_up():
    for shape in ("cosine", "linear", "constant"):
        assert rates(shape, steps=10, warmup=4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert rates(shape, warmup=0)[0] == 1.0


def test_cosine_is_half_a_wave_from_the_peak_to_the_final_share():
    result = rates("cosine", steps=10, warmup=2, final=0.1)
    assert result[2] == 1.0
    assert result[4] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)  # a quarter of the way
    assert result[6] == pytest.approx(0.55)  # half of it
    assert rate(10, steps=10, warmup=2, shape="cosine", final=0.1, cooldown=1.0) == pytest.approx(0.1)


def test_linear_stays_until_the_cooldown_and_then_falls_in_a_straight_line():
    assert rates("linear", steps=10, warmup=0, final=0.0, cooldown=0.5) == pytest.approx(
        [1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    )
    assert rates("linear", steps=12, warmup=2, final=0.5, cooldown=1.0)[2:] == pytest.approx(
        [1 - 0.05 * number for number in range(10)]
    )
    assert rate(10, steps=10, warmup=0, shape="linear", final=0.25, cooldown=0.5) == pytest.approx(0.25)


def test_constant_stays():
    assert rates("constant")[2:] == [1.0] * 8
