"""The training step: the network that is made, and the loss of a batch."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import ARCHITECTURES, tiny_model
from packing import pack
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

import acgpt.training.learner as learner_module
from acgpt.engine.architecture import check_model
from acgpt.engine.layout import Budget
from acgpt.engine.peft import adapter_layers, add_lora, join_products, switched
from acgpt.errors import ModelError
from acgpt.query.conditioning import Blocks, Conditioning, Empty, generator
from acgpt.training.learner import Learner, Work, choose_attention, has_plain_head, matmul_rate, new_model
from acgpt.training.networks import disable_dropout
from acgpt.training.recipe import Shape

BOS, MASK, VOCABULARY, LENGTH = 0, 1, 64, 11


def small_model(**how):
    model = new_model(Shape(2, 32, 4), vocabulary=VOCABULARY, positions=LENGTH + 1, **how).train()
    for weight in model.parameters():  # far from initialisation, where every prediction is the same
        if weight.ndim == 2:
            weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(weight.numel()))
    check_model(model)
    return model


def batch_of(conditioning, texts=5, budget=None, seed=0):
    tokens = np.random.default_rng(seed).integers(2, VOCABULARY, size=(texts, LENGTH))
    roles = np.stack([conditioning.roles(LENGTH, generator(seed, 0, item)) for item in range(texts)])
    return tokens, roles, pack(tokens, roles, bos=BOS, mask=MASK, budget=budget)


def learner_of(model, backend="dense"):
    return Learner(model, backend=backend, compiled=False)


MIXED = Conditioning((Blocks(r_max=0.8, unknown=0.2), Empty()), (0.7, 0.3))


def test_gradients_are_those_of_a_difference_quotient():
    model = small_model().double()
    learner, (_, _, batch) = learner_of(model), batch_of(MIXED, budget=Budget(64, 64))
    learner(batch).backward()
    rng = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        direction = torch.randn(weight.shape, generator=rng, dtype=torch.float64)
        around = []
        for sign in (1, -1):
            weight.data += sign * 1e-5 * direction
            around.append(learner(batch).item())
            weight.data -= sign * 1e-5 * direction
        slope = (around[0] - around[1]) / 2e-5
        assert (weight.grad * direction).sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-4), name


def test_bf16_on_a_cpu_is_near_fp32_and_learns():
    model = small_model()
    learner, (_, _, batch) = learner_of(model), batch_of(MIXED)
    exact = learner(batch).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = learner(batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=2e-2)
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


# ---- products of LoRA -----------------------------------------------------------------------------------------------


def adapted(architecture="llama", dropout=0.0, rank=4):
    model, _ = add_lora(tiny_model(architecture, vocabulary=VOCABULARY), rank=rank, alpha=2 * rank, dropout=dropout)
    disable_dropout(model) if not dropout else None
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first, and the gradients of lora_A with it
            weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    check_model(model)
    return model.double().train()


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_products_with_the_sum_of_weights_and_adapter_give_the_same_loss_and_gradients(architecture):
    model, (_, _, batch) = adapted(architecture), batch_of(MIXED)
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    with FlopCounterMode(display=False) as before:
        apart = learner_of(model)(batch)
    wanted = torch.autograd.grad(apart, learnt)
    assert join_products(model) == len(adapter_layers(model)) > 0
    with FlopCounterMode(display=False) as after:
        joined = learner_of(model)(batch)
    assert after.get_total_flops() != before.get_total_flops()  # it is another computation
    assert joined.item() == pytest.approx(apart.item(), rel=1e-12)
    for got, other in zip(torch.autograd.grad(joined, learnt), wanted, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-9, atol=1e-9)


def test_joined_layers_answer_as_before_without_gradients_and_without_the_adapter():
    model, (_, _, batch) = adapted(), batch_of(MIXED)

    def losses():
        with torch.no_grad():
            with_adapter = learner_of(model)(batch).item()
            with switched(model, None):
                return with_adapter, learner_of(model)(batch).item()

    before = losses()
    join_products(model)
    assert losses() == before
    with switched(model, None):  # and with gradients
        assert learner_of(model)(batch).item() == pytest.approx(before[1], rel=1e-12)


def test_layers_are_joined_only_where_that_is_exact_and_faster(monkeypatch):
    assert join_products(adapted(dropout=0.1)) == 0
    assert join_products(adapted("gpt2")) == 0  # its matrices are transposed
    assert join_products(small_model()) == 0  # no adapter
    monkeypatch.setattr("acgpt.engine.peft.NARROW", 1)
    assert join_products(adapted()) == 0


# ---- deep networks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize(
    ("rank", "joined"), [(None, False), (4, False), (4, True)], ids=["all weights", "an adapter", "a joined adapter"]
)
def test_the_blocks_of_a_deep_network_are_compiled_once_for_all_of_them(architecture, rank, joined, monkeypatch):
    compiled_graphs = []

    def count(graph, inputs):
        compiled_graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(learner_module, "DEEP", 4)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    torch._dynamo.reset()
    model = tiny_model(architecture, vocabulary=VOCABULARY, layers=4)
    if rank is not None:
        model, _ = add_lora(model, rank=rank, alpha=2 * rank)
    disable_dropout(model)
    check_model(model)
    model.train()
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    _, _, first = batch_of(MIXED, budget=Budget(64, 64))
    batches = [replace(first, ids=(first.ids + by) % VOCABULARY) for by in range(3)]  # of one shape, as on CUDA
    one, other = (Learner(model, backend="dense", compiled=compiled, joined=joined) for compiled in (True, False))
    for batch in batches:
        losses = [learner(batch) for learner in (one, other)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        for got, wanted in zip(*(torch.autograd.grad(loss, learnt) for loss in losses), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())
    assert len(compiled_graphs) == (1 if rank is None else 2)  # under an adapter the first block's input is frozen


def test_evaluation_finds_a_model_as_it_was(monkeypatch):
    monkeypatch.setattr(learner_module, "DEEP", 2)
    model = small_model()
    learner = Learner(model, backend="dense", compiled=True)
    assert [block for block, _ in learner.calls] == list(model.gpt_neox.layers)
    with pytest.raises(ZeroDivisionError), learner.compiled_blocks():
        assert all(block._compiled_call_impl is not None for block, _ in learner.calls)
        raise ZeroDivisionError
    assert all(block._compiled_call_impl is None for block, _ in learner.calls)


# ---- dropout --------------------------------------------------------------------------------------------------------


def losses(model, seeds=(0, 1, 0)):
    learner, (_, _, batch) = learner_of(model), batch_of(MIXED)
    results = []
    for seed in seeds:
        torch.manual_seed(seed)
        results.append(learner(batch).item())
    return results


@pytest.mark.parametrize("which", ["dropout", "attention_dropout"])
def test_dropout_changes_the_loss_of_a_training_step_by_its_seed_and_no_other(which):
    model = small_model(**{which: 0.3})
    one, other, again = losses(model)
    assert one == again != other
    assert len(set(losses(model.eval()))) == 1
    assert losses(small_model())[0] == pytest.approx(losses(model.eval())[0])


def test_attention_dropout_leaves_a_share_of_the_attention_weights_out():
    """If all attention weights are dropped, only the residual reaches a prediction, so copies have no effect."""
    model = small_model(attention_dropout=0.999999)
    tokens, roles, batch = batch_of(Conditioning())
    other = tokens.copy()
    other[roles == 1] = (other[roles == 1] + 7) % (VOCABULARY - 2) + 2
    copies = batch.segments.copies
    others = pack(other, roles, bos=BOS, mask=MASK)
    changed = replace(batch, ids=torch.cat([others.ids[:copies], batch.ids[copies:]]))
    learner = learner_of(model)
    torch.manual_seed(0)
    dropped = learner(batch).item(), learner(changed).item()
    kept = learner_of(model.eval())(batch).item(), learner_of(model.eval())(changed).item()
    assert dropped[0] == pytest.approx(dropped[1], rel=1e-6)
    assert kept[0] != pytest.approx(kept[1], rel=1e-3)


@pytest.mark.parametrize("backend", ["varlen", "fused"])
def test_a_backend_without_attention_dropout_refuses_it(backend):
    model = small_model(attention_dropout=0.1)
    _, _, batch = batch_of(Conditioning())
    with pytest.raises(ModelError, match=r"no (attention )?dropout"):
        learner_of(model, backend)(batch)


def test_attention_dropout_and_full_precision_go_through_the_dense_mask():
    assert choose_attention("cuda", half=True, dropout=0.0, head_dim=64) != "dense"
    assert choose_attention("cuda", half=True, dropout=0.1, head_dim=64) == "dense"
    assert choose_attention("cuda", half=False, dropout=0.0, head_dim=64) == "dense"
    assert choose_attention("cpu", half=True, dropout=0.0, head_dim=64) == "dense"


# ---- the network ----------------------------------------------------------------------------------------------------


def test_a_seed_fixes_the_weights_and_leaves_the_worlds_randomness_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, again, other = (small_new(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.get_input_embeddings().weight, other.get_input_embeddings().weight)


def small_new(seed=0):
    return new_model(Shape(8, 64, 4), vocabulary=100, positions=16, seed=seed)


def test_weights_begin_as_gpt2s_do():
    model = small_new()
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            ends_on_residual = name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))
            expected = 0.02 / 4 if ends_on_residual else 0.02  # √(2 · 8 layers) = 4
            assert weight.std().item() == pytest.approx(expected, rel=0.1), name
        elif name.endswith("bias"):
            assert not weight.any()


def test_the_network_is_gpt2_with_rotary_positions_and_tied_embeddings():
    model = small_new()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    config = model.config
    assert not config.use_parallel_residual and config.hidden_act == "gelu_pytorch_tanh"
    assert config.rope_parameters["partial_rotary_factor"] == 1.0
    plain = AutoModelForCausalLM.from_config(config)  # a config that transformers knows, with no code of ours
    assert type(plain) is type(model)


# ---- its cost -------------------------------------------------------------------------------------------------------


def test_the_count_of_operations_is_that_of_the_matrix_products():
    model = small_model()
    _, _, batch = batch_of(MIXED)
    learner = learner_of(model)
    with FlopCounterMode(display=False) as counter:
        learner(batch).backward()
    done = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in done.items() if str(op) in ("aten.mm", "aten.addmm"))
    assert Work.of(model).total(slots=batch.slots, asked=batch.asked, pairs=0) == products
    # q·k and a·v, forward and twice backward
    assert Work.of(model).total(slots=0, asked=0, pairs=10) == 12 * 2 * 32 * 10


def test_the_rate_of_this_machine_is_measured_without_touching_the_worlds_randomness():
    state = torch.get_rng_state()
    assert 1e8 < matmul_rate("cpu") < 1e15
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_that_is_a_matrix_is_known_as_one(architecture):
    model = tiny_model(architecture).train()
    assert has_plain_head(model) and model.training


def test_a_head_that_scales_or_biases_its_logits_or_is_adapted_is_no_plain_one():
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    shape |= {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    scaled = [GraniteConfig(logits_scaling=8.0, **shape), CohereConfig(logit_scale=0.06, **shape)]
    models = [AutoModelForCausalLM.from_config(config) for config in scaled]
    for model in models:
        model.get_output_embeddings().weight.data.normal_(0, 1)
    models.append(tiny_model())
    models[-1].lm_head = torch.nn.Linear(32, 50)
    models.append(add_lora(tiny_model(tie_word_embeddings=False), rank=2, alpha=4, targets=["lm_head"])[0])
    assert not any(map(has_plain_head, models))


# ---- weights of predictions, and a token that is never predicted ----------------------------------------------------


class Rows:
    """A reference for the loss kernel on a row of logits, called like Triton's kernels."""

    def __getitem__(self, grid):
        def run(logits, targets, losses, **_):
            for row, target in enumerate(targets.tolist()):
                if target < 0:
                    losses[row], logits[row] = 0.0, 0.0
                    continue
                scores = logits[row].log_softmax(-1)
                losses[row] = -scores[target]
                logits[row] = scores.exp()
                logits[row, target] -= 1

        return run


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("never", [None, 3])
def test_the_fused_loss_weighs_its_rows_and_leaves_a_token_out(weighted, never, monkeypatch):
    from acgpt.engine.kernels import loss as loss_kernel

    monkeypatch.setattr(loss_kernel, "rows_kernel", Rows())
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=rng, dtype=torch.float64).requires_grad_() for n in (9, 11))
    targets, weights = torch.tensor([0, 1, -100, 4, 10, 2, -100, 5, 5]), torch.rand(9, generator=rng).double() + 0.5
    weights = weights if weighted else None
    logits = hidden @ weight.T
    if never is not None:
        logits = logits.index_fill(1, torch.tensor([never]), float("-inf"))
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    want = (losses * weights if weighted else losses).sum() / 7
    whole = torch.compile(loss_kernel.linear_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=False)
    got = whole(hidden, weight, targets, weights, never) / 7
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    for one, other in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
