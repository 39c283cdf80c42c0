"""Parameter groups of the optimizers, and the learning rate schedule."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from models import tiny_model

from acgpt.engine.peft import add_lora
from acgpt.methods.sigma_network import SigmaGPTForCausalLM
from acgpt.training.learner import new_model
from acgpt.training.optimizer import Joined, Muon, build_optimizer, orthogonalise, rate
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
def test_every_parameter_is_optimized_exactly_once(muon):
    model = small_model()
    optimizer = build_optimizer(model, muon=muon, **RATES)
    held = [name for group in names_of(optimizer, model) for name in group]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())


def test_muon_gets_the_matrices_of_the_blocks_and_nothing_else():
    model = small_model()
    optimizer = build_optimizer(model, muon=True, **RATES)
    assert isinstance(optimizer, Joined)
    adamw, muon = optimizer.optimizers
    assert isinstance(adamw, torch.optim.AdamW)
    (held,) = names_of(muon, model)
    blocks = [name for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]
    assert sorted(held) == sorted(blocks)
    assert len(held) == 2 * 4  # qkv, output, up, down


@pytest.mark.parametrize("kind", ["rotary", "table"])
def test_a_table_of_positions_is_no_matrix_of_a_block(kind):
    options = {"network": SigmaGPTForCausalLM, "target_positions": kind}
    model = new_model(Shape(2, 16, 2), vocabulary=32, positions=8, **options)
    tables = {name for name, _ in model.named_parameters() if "embed" in name}
    assert len(tables) == 2  # of tokens, and of positions or offsets
    assert tables <= set(names_of(build_optimizer(model, muon=True, **RATES).optimizers[0], model)[0])


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


@pytest.mark.parametrize("muon", [False, True])
def test_only_matrices_decay_and_with_muon_only_those_of_the_blocks(muon):
    model = small_model()
    optimizer = build_optimizer(model, muon=muon, **RATES)
    decayed = {
        name
        for names, group in zip(names_of(optimizer, model), optimizer.param_groups, strict=True)
        for name in names
        if group["weight_decay"] == 0.3
    }
    assert all(group["weight_decay"] in (0.0, 0.3) for group in optimizer.param_groups)
    matrices = {name for name, weight in model.named_parameters() if weight.ndim == 2}
    assert decayed == ({name for name in matrices if ".layers." in name} if muon else matrices)


def test_each_has_its_own_rate_and_adamw_its_betas():
    optimizer = build_optimizer(small_model(), muon=True, **RATES)
    adamw, muon = optimizer.optimizers
    assert {group["lr"] for group in adamw.param_groups} == {1e-3}
    assert {group["betas"] for group in adamw.param_groups} == {(0.8, 0.9)}
    assert [group["lr"] for group in muon.param_groups] == [2e-2]


def test_frozen_parameters_are_left_alone():
    model = small_model()
    model.gpt_neox.layers[0].requires_grad_(False)
    held = [name for group in names_of(build_optimizer(model, muon=True, **RATES), model) for name in group]
    assert not any(".layers.0." in name for name in held)


# ---- several as one -------------------------------------------------------------------------------------------------


def test_a_schedule_reaches_every_optimizer():
    model = small_model()
    optimizer = build_optimizer(model, muon=True, **RATES)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)
    for number in range(3):
        for each, peak in zip(optimizer.optimizers, (1e-3, 2e-2), strict=True):
            assert [group["lr"] for group in each.param_groups] == [peak * 0.5**number] * len(each.param_groups)
        step(model, optimizer, number)
        schedule.step()


def test_every_optimizer_takes_its_step_and_forgets_its_gradients():
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, muon=True, **RATES)
    step(model, optimizer, 0)
    assert all(not torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert set(optimizer.state) == set(model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("muon", [False, True])
def test_a_saved_optimizer_goes_on_as_if_nothing_had_been(muon):
    model = small_model()
    optimizer = build_optimizer(model, muon=muon, **RATES)
    for number in range(3):
        step(model, optimizer, number)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, file)
    for number in range(3, 6):
        step(model, optimizer, number)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = small_model(seed=1)
    other.load_state_dict(saved["model"])
    resumed = build_optimizer(other, muon=muon, lr=9.0, muon_lr=9.0, betas=(0.1, 0.1), weight_decay=0.9)
    resumed.load_state_dict(saved["optimizer"])
    for number in range(3, 6):
        step(other, resumed, number)
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name


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
