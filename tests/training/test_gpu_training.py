"""Training on CUDA: the fused loss and attention against fp32 and a dense mask, and a run under torch.compile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import tiny_model
from runs import loss_of, recipe_of, write_base, write_corpus
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import acgpt
from acgpt.data.corpus import Corpus
from acgpt.engine.architecture import check_model
from acgpt.engine.engine import Engine
from acgpt.engine.kernels.loss import linear_cross_entropy
from acgpt.engine.length_head import LengthHead
from acgpt.engine.peft import add_lora
from acgpt.evaluation.dataset import dataset_of_corpus
from acgpt.evaluation.perplexity import evaluate
from acgpt.methods import METHODS, method_of
from acgpt.models.metadata import model_method
from acgpt.query.conditioning import Conditioning
from acgpt.training.batches import Batch, Batches
from acgpt.training.learner import Learner, new_model
from acgpt.training.recipe import Shape
from acgpt.training.train import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


GAPS = {
    "parts": [
        {"kind": "blocks", "r_max": 0.6},
        {"kind": "gaps", "r_min": 0.4, "r_max": 0.9, "passages": 6, "lengths": 0.5},
        {"kind": "gaps", "r_min": 0.4, "r_max": 0.9, "lengths": 1.0},
    ]
}


class Texts:
    """Texts that can be learnt: each counts upwards from a number of its own."""

    def __init__(self, count: int, vocabulary: int) -> None:
        self.count, self.vocabulary = count, vocabulary

    def chunks(self, length: int) -> int:
        return self.count

    def chunk(self, number: int, length: int) -> np.ndarray:
        return (number * 37 + np.arange(length)) % self.vocabulary


def batches(fixed: bool, length: int = 255, conditioning: dict | None = None) -> Batches:
    distribution = Conditioning.from_dict(conditioning or {"r_max": 0.6})
    texts = Texts(64, 500)
    return Batches(
        texts, count=100, size=8, length=length, conditioning=distribution, seed=1, bos=0, mask=None, fixed=fixed
    )  # fmt: skip


def network_of(conditioning: dict) -> tuple[PreTrainedModel, LengthHead | None]:
    """A network on the GPU, and a head for lengths if the conditioning asks for them."""
    model = new_model(Shape(2, 128, 2), vocabulary=512, positions=256).cuda()
    return model, LengthHead(128).cuda() if conditioning is GAPS else None


def on_gpu(batch: Batch) -> Batch:
    return batch.to("cuda")


def learn(learner: Learner, data: Batches) -> list[float]:
    """The losses of 60 steps, which were compiled once."""
    torch._dynamo.reset()
    counters.clear()  # of what tests before this one have compiled
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    losses = []
    for number in range(60):
        batch = on_gpu(data[number])
        with torch.autocast("cuda", torch.bfloat16):
            loss = learner(batch) / batch.asked
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["recompiles"])
    return losses


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("vocabulary", [97, 50304, 50257])
def test_the_fused_loss_and_its_gradients_are_those_of_plain_cross_entropy_in_fp32(vocabulary):
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, 64, device="cuda") * 0.3).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (300,), device="cuda")
    targets[::7] = -100
    loss = linear_cross_entropy(hidden, weight, targets) / 300
    loss.backward()
    plain = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    wanted = F.cross_entropy(plain[0] @ plain[1].T, targets, reduction="sum") / 300
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-3)
    for got, reference in zip((hidden, weight), plain, strict=True):
        assert relative(got.grad, reference.grad) < 1e-2


@pytest.mark.parametrize("backend", ["varlen", "fused"])
@pytest.mark.parametrize("conditioning", [{"r_max": 0.6}, {"empty": 1.0}, {"r_min": 0.9, "r_max": 1.0}, GAPS], ids=str)
def test_loss_and_gradients_of_a_packed_step_are_those_of_the_dense_mask_in_fp32(backend, conditioning):
    """With `GAPS`, batches have many short sequences, and some of no slots at all."""
    model, head = network_of(conditioning)
    learnt = [*model.parameters()]
    if head is not None:
        head.weight.data.normal_(0, 0.1, generator=torch.Generator("cuda").manual_seed(0))
        learnt += head.parameters()
    plain, padded = (batches(fixed, conditioning=conditioning) for fixed in (False, True))
    for number in range(3):
        reference = Learner(model, backend="dense", compiled=False, length_head=head)(on_gpu(plain[number]))
        wanted = torch.autograd.grad(reference, learnt)
        with torch.autocast("cuda", torch.bfloat16):
            loss = Learner(model, backend=backend, compiled=False, length_head=head)(on_gpu(padded[number]))
        assert loss.item() == pytest.approx(reference.item(), rel=2e-3)
        for one, other in zip(torch.autograd.grad(loss, learnt), wanted, strict=True):
            assert torch.isfinite(one).all()
            assert relative(one, other) < 3e-2


@pytest.mark.parametrize(("conditioning", "share"), [({"r_max": 0.6}, 0.7), (GAPS, 0.9)], ids=["blocks", "gaps"])
def test_a_compiled_step_learns_and_every_batch_has_the_one_shape(conditioning, share):
    model, head = network_of(conditioning)
    learner = Learner(model, backend="fused", compiled=True, length_head=head)
    losses = learn(learner, batches(True, conditioning=conditioning))
    assert np.mean(losses[-5:]) < share * losses[0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [{"rank": 8}, None])
def test_a_pretrained_model_is_tuned_in_bf16_and_measures_the_same_in_fp32(lora, checkpointing, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    folder = write_base(tmp_path / "base", corpus, width=128)
    keys = {"lora": lora, "steps": 40, "batch": 8, "device": "auto", "checkpointing": checkpointing}
    results = train(recipe_of(corpus, tmp_path / "run", base=folder, **keys), quiet=True)
    assert results is not None
    assert (results["attention"], results["compiled"], results["precision"]) == ("fused", not checkpointing, "bf16")
    losses = list(loss_of(tmp_path / "run").values())
    assert losses[-1] < losses[0] - 0.3
    lm = acgpt.load(str(folder), adapter=results["model"]) if lora else acgpt.load(results["model"])
    texts, _ = dataset_of_corpus(Corpus.open(corpus), split="validation", length=31, limit=6, r_max=0.6)
    assert texts.hash == results["evaluation"]["set"]["hash"]
    again = evaluate(model_method(lm.metadata), Engine(lm.model.float(), bos=lm.bos, mask=lm.mask), texts)
    for mode, answer in again.modes.items():
        assert results["evaluation"]["modes"][mode]["perplexity"] == pytest.approx(answer.perplexity, rel=0.02)


@pytest.mark.parametrize(("compiled", "deep"), [(False, 16), (True, 16), (True, 1)], ids=["eager", "whole", "blocks"])
def test_the_gradients_of_an_adapter_on_a_bf16_model_are_those_of_the_dense_mask_in_fp32(compiled, deep, monkeypatch):
    monkeypatch.setattr("acgpt.training.learner.DEEP", deep)
    model, _ = add_lora(tiny_model("llama", vocabulary=512, width=128, positions=256, scale=0.05), rank=4, alpha=8)
    check_model(model.cuda())
    learnt = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        for name, weight in learnt.items():
            if "lora_B" in name:  # zero at first, and the gradients of lora_A with it
                weight.normal_(std=0.05)
    plain, padded = batches(False), batches(True)
    reference = Learner(model, backend="dense", compiled=False)(on_gpu(plain[0]))
    wanted = torch.autograd.grad(reference, list(learnt.values()))
    for name, weight in model.named_parameters():
        if name not in learnt:
            weight.data = weight.data.bfloat16()
    with torch.autocast("cuda", torch.bfloat16):
        loss = Learner(model, backend="fused", compiled=compiled)(on_gpu(padded[0]))
    got = torch.autograd.grad(loss, list(learnt.values()))
    assert loss.item() == pytest.approx(reference.item(), rel=5e-3)
    for name, one, other in zip(learnt, got, wanted, strict=True):
        assert relative(one, other) < 0.06, name


OTHERS = [name for name, method in METHODS.items() if not method.drawable]
NETWORKS = [(name, {}) for name in OTHERS] + [("sigma-gpt-random", {"target_positions": "table"})]


def batches_of(method, fixed: bool, length: int = 255) -> Batches:
    distribution = Conditioning.from_dict({"r_max": 0.6})
    return Batches(
        Texts(64, 500), count=100, size=8, length=length, conditioning=method.conditioning(distribution), seed=1, bos=0,
        mask=511 if method.needs_mask else None, fixed=fixed, balance=distribution, method=method,
    )  # fmt: skip


def learner_of(method, model, backend: str, compiled: bool = False) -> Learner:
    never = 511 if method.needs_mask else None
    return Learner(model, backend=backend, compiled=compiled, forbidden_token=never)


@pytest.mark.parametrize("backend", ["varlen", "fused"])
@pytest.mark.parametrize(("name", "own"), NETWORKS)
def test_every_methods_loss_and_gradients_are_those_of_the_dense_mask_in_fp32(name, own, backend):
    method = method_of(name)
    model = new_model(
        Shape(2, 128, 2), vocabulary=512, positions=255 + method.overhead, network=method.network, **own
    ).cuda()  # fmt: skip
    plain, padded = batches_of(method, False), batches_of(method, True)
    for number in range(2):
        reference = learner_of(method, model, "dense")(on_gpu(plain[number]))
        wanted = torch.autograd.grad(reference, list(model.parameters()))
        with torch.autocast("cuda", torch.bfloat16):
            loss = learner_of(method, model, backend)(on_gpu(padded[number]))
        got = torch.autograd.grad(loss, list(model.parameters()))
        assert loss.item() == pytest.approx(reference.item(), rel=3e-3)
        for one, other in zip(got, wanted, strict=True):
            assert torch.isfinite(one).all()
            assert relative(one, other) < 4e-2


@pytest.mark.parametrize(("name", "own"), NETWORKS)
def test_a_compiled_step_of_every_method_learns_in_one_graph(name, own):
    method = method_of(name)
    model = new_model(
        Shape(2, 128, 2), vocabulary=512, positions=255 + method.overhead, network=method.network, **own
    ).cuda()  # fmt: skip
    losses = learn(learner_of(method, model, "fused", compiled=True), batches_of(method, True))
    assert np.mean(losses[-5:]) < np.mean(losses[:3]) - 0.3


@pytest.mark.parametrize("name", OTHERS)
def test_every_method_is_trained_in_bf16_and_asked_and_sampled_in_it(name, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", mask=False)
    keys = {"method": name, "steps": 40, "device": "auto", "model": {"layers": 2, "width": 128, "heads": 4}}
    results = train(recipe_of(corpus, tmp_path / "run", **keys), quiet=True)
    assert results is not None and results["attention"] == "fused" and results["compiled"]
    lm = acgpt.load(results["model"], dtype="bfloat16")
    exact = acgpt.load(results["model"], dtype="float32")
    question = "The cat {{sat on}} the mat."
    assert lm.log_prob(question).log_prob == pytest.approx(exact.log_prob(question).log_prob, abs=0.3)
    one, other = (lm.sample("The cat {{_3}} the mat.", n=4, seed=1) for _ in range(2))
    assert [sample.text for sample in one] == [sample.text for sample in other]
