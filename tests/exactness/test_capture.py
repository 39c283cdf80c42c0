"""Capturing the work of a GPU: with stand-ins for CUDA, and on a GPU (`make gpu-test`)."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from acgpt.engine import device
from acgpt.engine.device import capture, capture_stream


@pytest.fixture
def cuda(monkeypatch):
    """Stand-ins that note the current stream; like torch's, a capture that fails leaves its own stream behind."""
    streams = ["default"]

    @contextmanager
    def graph(graph, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(device.torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(device.torch.cuda, "graph", graph)
    monkeypatch.setattr(device.torch.cuda, "Stream", lambda name: f"stream of {name}")
    monkeypatch.setattr(device.torch.cuda, "current_stream", lambda _: streams[-1])
    monkeypatch.setattr(device.torch.cuda, "set_stream", streams.append)
    capture_stream.cache_clear()
    yield streams
    capture_stream.cache_clear()


def test_work_is_captured_on_a_stream_of_its_gpu(cuda):
    for name in ("cuda:1", "cuda:0", "cuda:1"):
        assert capture(lambda: cuda[-1], name, "pool")[1] == f"stream of {name}"
        assert cuda[-1] == "default"


def test_a_capture_that_fails_leaves_the_stream_as_it_was(cuda):
    def fail():
        raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture(fail, "cuda:1", "pool")
    assert cuda[-1] == "default"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestOnCuda:
    def test_a_replay_computes_again_what_was_captured(self):
        gpu = torch.device("cuda", torch.cuda.current_device())
        before, x = torch.cuda.current_stream(gpu), torch.ones(4, device=gpu)
        graph, doubled = capture(lambda: x * 2, gpu, None)
        x.fill_(5)
        graph.replay()
        assert doubled.tolist() == [10] * 4 and torch.cuda.current_stream(gpu) == before

    def test_a_capture_that_fails_leaves_a_stream_that_can_be_used(self):
        gpu = torch.device("cuda", torch.cuda.current_device())
        before, x = torch.cuda.current_stream(gpu), torch.ones(4, device=gpu)
        with pytest.raises(RuntimeError):
            capture(lambda: x.sum().item(), gpu, None)  # waits for the device, which a capture does not permit
        assert torch.cuda.current_stream(gpu) == before
        assert (x + 1).tolist() == [2] * 4
