"""Decoding steps with few kernels: under Triton's interpreter on a CPU, and on a GPU (`make gpu-test`).

The interpreter must be chosen before Triton is imported, so those cases run in a process of their own: this file, as a
program. It prints the results that the tests below judge.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from interpreter import run_interpreted
from joining import join_and_leave
from models import random_query, tiny_model
from transformers import GPTNeoXForCausalLM

from acgpt.engine import cuda_step
from acgpt.engine.architecture import check_model
from acgpt.engine.attention import Ragged, run
from acgpt.engine.cuda_step import CudaStep, CudaSteps, copied_bytes, supports
from acgpt.engine.decode import Decoder, Rows, draw_among, gather_samples
from acgpt.engine.decoding import Decoding
from acgpt.engine.engine import Engine
from acgpt.engine.modules import Watch
from acgpt.methods.ac_gpt import AcGpt
from acgpt.methods.sigma_gpt import SigmaGptTemporal
from acgpt.methods.sigma_network import SigmaGPTForCausalLM
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

NETWORKS = {
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-NeoX, parallel residual, partial rotary": ("gpt_neox", {"use_parallel_residual": True, "rotary_pct": 0.25}),
    "GPT-NeoX without biases of attention": ("gpt_neox", {"attention_bias": False}),
    "σ-GPT": ("sigma", {}),
    "σ-GPT, table": ("sigma", {"target_positions": "table"}),
    "Llama": ("llama", {}),
    "Llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}
METHODS = {"gpt_neox": AcGpt, "llama": AcGpt, "sigma": SigmaGptTemporal}  # how the networks above are asked
# Temperature, top-p and top-k.
DRAWS = {
    "greedy": (0.0, 1.0, None),
    "all tokens": (1.0, 1.0, None),
    "all tokens, cold": (0.6, 1.0, None),
    "top-p": (0.8, 0.95, None),
    "small top-p": (1.3, 0.4, None),
    "tiny top-p": (0.7, 1e-6, None),
    "large top-p": (1.0, 0.999999, None),
    "top-k": (1.0, 1.0, 5),
    "one of the vocabulary's size": (1.0, 1.0, 10_000),
    "top-k and top-p": (0.8, 0.9, 20),
}


def network(architecture, width=128, dtype=torch.float32, vocabulary=50, **options):
    """Return a small network with heads of 32 channels, or as many as a quarter of the width."""
    if architecture == "llama":
        model = tiny_model("llama", scale=0.1, width=width, vocabulary=vocabulary, positions=256, **options)
    else:
        model = neox(architecture, width, vocabulary, **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases are 0 and norms 1 at initialisation
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def neox(architecture, width, vocabulary, **options):
    network = GPTNeoXForCausalLM if architecture == "gpt_neox" else SigmaGPTForCausalLM
    shape = {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_pytorch_tanh"}
    config = network.config_class(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=2 * width, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, **shape | options,
    )  # fmt: skip
    model = network(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model


def with_lora(model, **options):
    """Add two LoRA adapters with random weights to a network; the first one is active."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, **options)
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("other", config)
    return adapted.eval()


def random_logits(dtype, size, scale, rows=4):
    """Return logits: plain ones; some forbidden; many ties; zeros of both signs. Rows have a stride of their own."""
    logits = (torch.randn(rows, size + 11, generator=torch.Generator().manual_seed(size)) * scale).to(dtype)
    logits[1, ::3] = float("-inf")
    logits[2] = logits[2].round()
    logits[3, :5] = -0.0
    return logits[:, :size]


def outside(logits, uniform, tokens, temperature, top_p, top_k):
    """Return how far each draw is from the interval of its token, as probability; by sorting, in float64."""
    errors = []
    for row, u, token in zip(logits.double(), uniform.tolist(), tokens.tolist(), strict=True):
        if temperature == 0:
            errors.append(float(token != int((row == row.max()).nonzero()[0])))
            continue
        p = (row / temperature).softmax(-1)
        truncates = top_k is not None or top_p < 1
        order = row.sort(descending=True, stable=True).indices if truncates else torch.arange(len(row))
        mass = p[order].cumsum(0)[:top_k]
        before = mass - p[order][:top_k]
        kept = int((before < top_p * mass[-1] - 1e-6).sum()) if top_p < 1 else len(mass)
        total, place = mass[max(kept, 1) - 1].item(), order.tolist().index(token)
        if place >= len(mass) or p[token] == 0:
            errors.append(1.0)
            continue
        errors.append(max(0.0, before[place].item() - u * total, u * total - mass[place].item()))
    return max(errors)


def interpret_draw(option, dtype, size, scale):
    """Return the errors of the tokens and of their log-probabilities, and the share of other tokens than sorted."""
    from acgpt.engine.kernels import draw as kernel

    kernel.TUNING = {"BLOCK": 256, "num_warps": 4}
    logits = random_logits(dtype, size, scale)
    uniform = torch.rand(4, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    uniform[0] = 1 - 1e-12  # rounds to 1 in float32
    tokens, log_probs = kernel.draw(logits, uniform, *option)
    temperature, top_p, top_k = option
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    expected = draw_among(logits, uniform, sampling)[0]  # on a CPU: sorted
    scores = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return {
        "draw": outside(logits, uniform, tokens, *option),
        "log_prob": (log_probs - scores).abs().max().item(),
        "others": (tokens != expected).double().mean().item(),
    }


def interpret_nan():
    """Return the log-probabilities drawn from logits of which one, or all, are no numbers."""
    from acgpt.engine.kernels import draw as kernel

    logits = torch.zeros(3, 300).half()
    logits[0, 7], logits[1], logits[2] = float("nan"), float("nan"), float("-inf")
    return [kernel.draw(logits, torch.full((3,), 0.5), *option) for option in DRAWS.values()]


def interpret_network(architecture, options, copied):
    """Return the relative difference between a step and its network: logits of all slots, keys and values."""
    model = network(architecture, **options)
    check_model(model)
    assert supports(model)
    step = CudaStep(model, copied)
    assert step.head.weight.shape[0] == (64 if copied else 50)
    with torch.no_grad():
        return max(cuda_step.difference(step, model), cuda_step.packed_difference(step, model, "dense"))


def interpret_adapters():
    """Return the relative differences with each adapter, and none; and after the weights have changed."""
    adapted, errors = with_lora(network("llama")), []
    model = adapted.get_base_model()
    check_model(model)
    with torch.no_grad():
        for name in ("default", "other"):
            adapted.set_adapter(name)
            step = CudaStep(model, True)
            errors += [cuda_step.difference(step, model), cuda_step.packed_difference(step, model, "dense")]
            for weight in model.parameters():
                weight.mul_(1.1)
            wrong = cuda_step.difference(step, model)
            step.refresh()
            errors.append(cuda_step.difference(step, model))
            assert wrong > 1e-3
        with adapted.disable_adapter():
            errors.append(cuda_step.difference(CudaStep(model, True), model))
            errors.append(cuda_step.difference(CudaStep(model, False), model))
    return max(errors)


def interpret_ragged_rows():
    """Return the difference of rows of several positions with padding, whose logits are taken at the last slot."""
    model = network("llama")
    check_model(model)
    slots = torch.tensor([[3, 4, 5], [40, 40, 0]])  # 40 is the spare slot
    ids, positions, logits = torch.tensor([[5, 6, 7], [0, 0, 8]]), torch.tensor([[1, 2, 3], [0, 0, 0]]), []
    state = torch.zeros(1, 2, 0, 32)
    for forward in (CudaStep(model, True), lambda *inputs: run(model, *inputs)):
        cache = Rows([(state, state)] * 2, 3, 41)
        cache.advance(slots, 40)
        with torch.no_grad():
            logits.append(forward(ids, positions, Ragged(slots, 40), 1, cache))
    assert logits[0].shape == (2, 1, 50)
    return ((logits[0] - logits[1]).norm() / logits[1].norm()).item()


def interpret_bookkeeping(architecture):
    """Return whether steps draw the same samples with and without the kernels that look up and write."""
    model, method, answers, same = network(architecture, dtype=torch.float16), METHODS[architecture](), [], []
    check_model(model)
    queries = [random_query(seed, length) for seed, length in ((0, 9), (1, 5), (2, 7))]
    for fused in (True, False):
        engine, step = Engine(model, bos=0, mask=1), CudaStep(model, True)
        engine.ragged, engine.forward = True, lambda *_, step=step: step
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            if not fused:
                patch.setattr(Decoder, "fused_step", plain_step)
            answers.append(drawn_by(method, engine, queries, 2, Sampling(temperature=0.8, top_p=0.9, seed=3)))
        assert step.calls > 3
    for ours, theirs in zip(*answers, strict=True):
        for (tokens, log_probs), (wanted, scores) in zip(ours, theirs, strict=True):
            same.append(np.array_equal(tokens, wanted) and np.allclose(log_probs, scores, rtol=0, atol=1e-3))
    return all(same)


def plain_step(decoder, rows, width, capacity, sampling, ordered, forbidden_token, forward):
    """Take a step without the kernels that look up and write: `Decoder.step` does so for constrained rows."""
    decoder.allowed = None
    return decoder.step(rows, width, capacity, sampling, ordered, forbidden_token, True, forward)


def drawn_by(method, engine, queries, n, sampling):
    """Return the n samples of each query that a method draws."""
    return gather_samples(method.stream(engine, queries, n, sampling), queries, n)


def interpret_all():
    results = {"nan": [[log_prob.isnan().tolist(), token.tolist()] for token, log_prob in interpret_nan()]}
    for name, option in DRAWS.items():
        cases = [(torch.float16, 37, 0.5), (torch.float16, 300, 3.0), (torch.bfloat16, 700, 2.0)]
        results[f"draw: {name}"] = [interpret_draw(option, *case) for case in (*cases, (torch.bfloat16, 256, 20.0))]
    for name, (architecture, options) in NETWORKS.items():
        results[name] = [interpret_network(architecture, options, copied) for copied in (True, False)]
    results["ragged rows"] = interpret_ragged_rows()
    results["bookkeeping"] = {architecture: interpret_bookkeeping(architecture) for architecture in METHODS}
    try:
        results["adapters"] = interpret_adapters()
    except pytest.skip.Exception:
        results["adapters"] = None
    return results


@pytest.fixture(scope="module")
def interpreted():
    """Results by case, from a process with Triton's interpreter."""
    return run_interpreted(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAWS)
def test_a_draw_without_a_sort_is_the_one_of_sorted_tokens(interpreted, case):
    for result in interpreted[f"draw: {case}"]:
        assert result["draw"] < 2e-6 and result["log_prob"] < 1e-5, result
    assert sum(result["others"] for result in interpreted[f"draw: {case}"]) <= 0.25  # at most one, by rounding


@pytest.mark.slow
def test_logits_that_are_no_numbers_are_found(interpreted):
    for isnan, tokens in interpreted["nan"]:
        assert isnan == [True] * 3 and all(0 <= token < 300 for token in tokens)


@pytest.mark.slow
@pytest.mark.parametrize("case", NETWORKS)
def test_a_step_computes_what_its_network_computes(interpreted, case):
    assert all(error < 1e-5 for error in interpreted[case]), interpreted[case]


@pytest.mark.slow
def test_rows_of_several_positions_agree_with_the_network(interpreted):
    assert interpreted["ragged rows"] < 1e-5


@pytest.mark.slow
def test_adapters_are_merged_and_changed_weights_copied_again(interpreted):
    if interpreted["adapters"] is None:
        pytest.skip("needs peft")
    assert interpreted["adapters"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("architecture", METHODS)
def test_samples_with_all_kernels_are_those_without(interpreted, architecture):
    assert interpreted["bookkeeping"][architecture]


# ---- networks that are used themselves -------------------------------------------------------------------------------


def test_networks_that_a_step_cannot_stand_for_are_refused():
    assert supports(network("llama")) and supports(network("gpt_neox"))
    assert (
        not supports(tiny_model("qwen3")) and not supports(tiny_model("gpt2")) and not supports(tiny_model("mistral"))
    )
    assert not supports(network("llama", hidden_act="gelu"))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert not supports(network("llama", rope_parameters=dynamic))
    mixed = network("llama", dtype=torch.bfloat16)
    mixed.model.norm.float()
    assert not supports(mixed)


def test_adapters_of_other_kinds_are_refused():
    assert supports(with_lora(network("llama")).get_base_model())
    assert not supports(with_lora(network("llama"), use_dora=True).get_base_model())
    assert not supports(with_lora(network("llama"), modules_to_save=["norm"]).get_base_model())
    merged = with_lora(network("llama"))
    merged.merge_adapter()
    assert not supports(merged.get_base_model())


def test_only_small_copies_are_made():
    model = network("llama", vocabulary=64)
    linears = sum(
        getattr(layer.mlp, name).weight.nbytes for layer in model.model.layers for name in ("gate_proj", "up_proj")
    )
    linears += sum(
        getattr(layer.self_attn, name).weight.nbytes
        for layer in model.model.layers
        for name in ("q_proj", "k_proj", "v_proj")
    )
    assert copied_bytes(model) == linears  # the vocabulary is aligned
    assert copied_bytes(network("gpt_neox", vocabulary=64)) == 0
    assert copied_bytes(network("gpt_neox", vocabulary=50)) == 50 * 128 * 4


def test_a_cpu_uses_the_network():
    assert CudaSteps(network("llama")).current() is None


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch):
    """The shapes of the ids of all passes of a step in a test; replays of captured steps are not among them."""
    shapes, forward = [], CudaStep.__call__

    def counted(self, ids, *arguments):
        shapes.append(tuple(ids.shape))
        return forward(self, ids, *arguments)

    monkeypatch.setattr(CudaStep, "__call__", counted)
    return shapes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestOnCuda:
    @staticmethod
    def engines(model):
        """Return an engine that uses the steps, and one that does not."""
        network_itself = Engine(model, bos=0, mask=1, backend="varlen", budget=500)
        network_itself.cuda_steps.current = lambda: None
        return Engine(model, bos=0, mask=1, backend="varlen", budget=500), network_itself

    @staticmethod
    def check_scores(model, rows, nats=0.08, method=None):
        """Check that (query, positions, tokens, log-probabilities) agree with one pass over the filled text."""
        engine = Engine(model, bos=0, mask=1, backend="dense", budget=500)
        for query, positions, tokens, log_probs in rows:
            filled = list(query.tokens)
            for position, token in zip(positions, tokens, strict=True):
                filled[position - 1] = int(token)
            with torch.inference_mode():
                scores = (method or AcGpt()).score(engine, [Query(filled, query.given, query.asked)])[0]
            assert np.abs(np.array(scores) - np.array(log_probs)).max() < nats

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("case", NETWORKS)
    def test_a_step_computes_what_its_network_computes(self, case, dtype):
        architecture, options = NETWORKS[case]
        model = network(architecture, dtype=dtype, width=256, **options).cuda()
        check_model(model)
        step = CudaSteps(model).current()
        assert step is not None
        with torch.no_grad():
            error = cuda_step.difference(step, model)
        print(f"{case} {dtype}: relative difference {error:.2e}")
        assert error < (3e-2 if dtype == torch.bfloat16 else 4e-3)

    @pytest.mark.parametrize("width", [1, 4])
    @pytest.mark.parametrize("architecture", METHODS)
    def test_samples_agree_with_one_pass_and_with_the_network(self, architecture, width, passes, monkeypatch):
        monkeypatch.setattr("acgpt.engine.decoding.choose_width", lambda *_: width)
        model, method = network(architecture, dtype=torch.float16).cuda(), METHODS[architecture]()
        check_model(model)
        queries = [random_query(seed, length, share=0.5) for seed, length in enumerate((200, 5, 31, 1, 120))]
        for sampling in (Sampling(seed=3), Sampling(temperature=0.8, top_p=0.9, seed=4), Sampling(temperature=0)):
            passes.clear()
            with torch.inference_mode():
                ours, theirs = (drawn_by(method, engine, queries, 3, sampling) for engine in self.engines(model))
            assert {shape[1] for shape in passes if shape[0] > 1} == {width}
            pairs = [pair for samples in zip(ours, theirs, strict=True) for pair in zip(*samples, strict=True)]
            equal = np.mean([np.array_equal(one[0], other[0]) for one, other in pairs])
            assert equal > 0.5  # rounding decides a token now and then, and all tokens after it
            rows = [
                (query, query.asked_positions, *drawn)
                for query, samples in zip(queries, ours, strict=True)
                for drawn in samples
            ]
            self.check_scores(model, rows, method=method)

    def test_rows_that_join_and_leave_agree_with_one_pass(self, passes):
        model = network("llama", dtype=torch.float16).cuda()
        check_model(model)
        decoding = Decoding(self.engines(model)[0], Sampling(temperature=0.9, top_k=20, seed=3))
        finished, captured = join_and_leave(decoding, turns=60)
        assert captured and passes
        rows = [(row.query, *zip(*row.drawn, strict=True)) for row in finished]
        self.check_scores(model, rows)

    def test_rows_with_options_of_their_own_agree_with_one_pass(self, passes):
        model = network("gpt_neox", dtype=torch.float16).cuda()
        check_model(model)
        decoding = Decoding(self.engines(model)[0])
        samplings = [Sampling(seed=3), Sampling(temperature=0), Sampling(temperature=0.7, top_k=4, seed=1)]
        rows = decoding.prefill([random_query(0, 40)] * 3, samplings=samplings)
        while any(not row.done for row in rows):
            decoding.step()
        assert passes
        self.check_scores(model, [(row.query, *zip(*row.drawn, strict=True)) for row in rows])

    def test_every_adapter_and_trained_weights_are_obeyed(self, passes):
        adapted = with_lora(network("llama", dtype=torch.float16).cuda())
        model = adapted.get_base_model()
        check_model(model)
        engine, query = self.engines(model)[0], random_query(0, 60)

        def check():
            used = len(passes)
            with torch.inference_mode():
                ((tokens, log_probs),) = engine.sample([query], 1, Sampling(seed=0), True)[0]
            self.check_scores(model, [(query, query.asked_positions, tokens, log_probs)], nats=0.15)
            return len(passes) > used

        assert check()
        adapted.set_adapter("other")
        assert check()
        with adapted.disable_adapter():
            assert check()
        step = engine.cuda_steps.current()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.base_layer.weight.mul_(-1)
        check()  # perhaps by graphs captured before
        assert engine.cuda_steps.current() is step and len(engine.cuda_steps.steps) == 3

    def test_hooks_and_another_attention_are_obeyed(self):
        model = network("llama", dtype=torch.bfloat16).cuda()
        steps = CudaSteps(model)
        assert steps.current() is None  # its attention is not acgpt's
        check_model(model)
        assert steps.current() is not None
        watch = model.model.layers[0].register_forward_pre_hook(Watch(lambda: None))
        assert steps.current() is not None
        hook = model.model.layers[1].register_forward_hook(lambda *_: None)
        assert steps.current() is None
        hook.remove()
        watch.remove()
        assert steps.current() is not None

    def test_a_forbidden_token_is_not_drawn(self, passes):
        model = network("gpt_neox", dtype=torch.float16).cuda()
        check_model(model)
        query = Query([None] * 100, [False] * 100)
        engine = self.engines(model)[0]
        with torch.inference_mode():
            free = engine.sample([query], 4, Sampling(seed=0), True)[0]
            forbidden = int(np.bincount(np.concatenate([tokens for tokens, _ in free])).argmax())
            samples = engine.sample([query], 4, Sampling(seed=0), True, forbidden_token=forbidden)[0]
        assert passes and all((tokens != forbidden).all() for tokens, _ in samples)

    @pytest.mark.parametrize("size", [50_257, 262_144])
    @pytest.mark.parametrize("scale", [0.3, 3.0])
    @pytest.mark.parametrize("case", DRAWS)
    def test_draws_from_large_vocabularies_are_those_of_sorted_tokens(self, case, size, scale):
        option = DRAWS[case]
        logits = random_logits(torch.bfloat16, size, scale, rows=16)
        uniform = torch.rand(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        temperature, top_p, top_k = option
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
        (tokens, log_probs, _), (again, *_) = (draw_among(logits.cuda(), uniform.cuda(), sampling) for _ in range(2))
        assert torch.equal(tokens, again)
        assert outside(logits, uniform, tokens, *option) < 2e-5  # float32 sums of 50,000 and more numbers
        scores = logits.double().log_softmax(-1).gather(1, tokens.cpu()[:, None])[:, 0]
        assert (log_probs.cpu() - scores).abs().max() < 1e-4


if __name__ == "__main__":
    print(json.dumps(interpret_all()))
