"""torch as a script for a GPU uses it, with the CPU in its place."""

from __future__ import annotations

import copy
import statistics
import time

import pytest
import torch

from cutex.arch import arch
from cutex.sim.host.cuda_graphs import deferred
from cutex.sim.host.stopwatch import LEAST, STOPWATCH
from cutex.sim.host.torch_stand_in import torch_on_cpu


@pytest.fixture(autouse=True)
def gpu():
    with torch_on_cpu(arch("sm_90a")) as memory:
        yield memory


def test_modules_and_what_is_read_from_a_file_go_to_the_gpu(tmp_path):
    layer = torch.nn.Linear(4, 4).to("cuda")
    assert all(p.is_cuda for p in layer.parameters())
    assert next(copy.deepcopy(layer).parameters()).is_cuda
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    read = torch.load(tmp_path / "layer.pt", map_location="cuda")
    assert read["weight"].is_cuda and torch.equal(read["weight"], layer.weight)


def test_the_default_device():
    with torch.device("cuda"):
        assert torch.ones(3).is_cuda and torch.randn(3).is_cuda
        assert not torch.ones(3, device="cpu").is_cuda
    assert not torch.ones(3).is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.ones(3).is_cuda and torch.nn.Linear(4, 4).weight.is_cuda
        assert torch.nn.functional.one_hot(torch.arange(3)).is_cuda
        with torch.device("cpu"):
            assert not torch.ones(3).is_cuda
    finally:
        torch.set_default_device(None)
    assert not torch.ones(3).is_cuda


def test_a_gradient_is_on_the_gpu_and_is_itself():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert grad.is_cuda and grad.contiguous().device.type == "cuda"
            assert torch.zeros(1, device=grad.device).is_cuda
            return grad * 2

    for n in (3, 100):
        x = torch.randn(n, device="cuda").requires_grad_()
        Double.apply(x).sum().backward()
        assert x.grad.is_cuda and x.grad.unique().tolist() == [2]
        x.grad.zero_()
        assert x.grad.abs().sum() == 0
    host = torch.randn(3).requires_grad_()
    host.sum().backward()
    assert not host.grad.is_cuda


def test_products_of_another_type_than_their_operands():
    a = torch.randn(8, 16, device="cuda").bfloat16()
    exact = a.double() @ a.double().T
    for made in (
        torch.mm(a, a.T, out_dtype=torch.float32),
        torch.bmm(a[None], a.T[None], out_dtype=torch.float32)[0],
        torch.addmm(torch.zeros(8, 8, device="cuda"), a, a.T, out_dtype=torch.float32),
    ):
        assert made.dtype == torch.float32 and made.is_cuda
        torch.testing.assert_close(made.double(), exact, atol=1e-5, rtol=1e-5)


def test_what_asks_for_the_gpu_besides_gets_an_answer():
    with torch.cuda.device(0):
        properties = torch.cuda.get_device_properties(0)
    assert properties.shared_memory_per_block_optin == 227 << 10
    assert torch.cuda.mem_get_info()[1] == properties.total_memory
    assert torch.cuda.cudart().cudaProfilerStart() == 0
    assert torch.accelerator.current_accelerator().type == "cuda"
    chance = torch.Generator("cuda").manual_seed(1)
    assert torch.randn(4, device="cuda", generator=chance).is_cuda
    assert torch.empty(3, pin_memory=True).pin_memory().device.type == "cpu"
    assert torch.compile(lambda x: x + 1)(1) == 2 and torch.compile()(len) is len


def test_events_give_the_time_of_the_simulation_or_the_predicted_one(monkeypatch):
    def timed():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with pytest.raises(ValueError, match="recorded"):
            start.elapsed_time(end)
        start.record()
        time.sleep(0.002)
        end.record()
        return start.elapsed_time(end)

    assert min(times := [timed() for _ in range(3)]) >= 2 and statistics.stdev(times) >= 0
    monkeypatch.setattr(STOPWATCH, "predicted", 5.0)
    assert timed() == LEAST  # no launch in between


def test_benchmarks_of_triton_call_once():
    pytest.importorskip("triton")
    from triton.testing import do_bench

    calls = []
    assert do_bench(lambda: calls.append(1), warmup=3) > 0
    assert len(do_bench(lambda: calls.append(1), quantiles=[0.2, 0.8])) == 2
    assert len(do_bench(lambda: calls.append(1), return_mode="all")) == 1
    assert len(calls) == 3
    from triton import runtime

    active = runtime.driver.active
    active.clear_cache(active.get_empty_cache_for_benchmark())


class Kernel:
    """Adds 1 to a tensor, as a launch of the DSL's does."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __call__(self) -> None:
        if not deferred(self):
            self.x += 1


def test_a_graph_runs_when_it_is_replayed_and_not_before():
    x = torch.zeros(4, device="cuda")
    scale = torch.ones(4, device="cuda")
    add, graph = Kernel(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        x.mul_(2)
        add()
        y = (x * scale).reshape(2, 2)
        z = torch.empty(2, 2, device="cuda")
        torch.add(y, 10, out=z)
    assert not torch.cuda.is_current_stream_capturing() and x.sum() == 0
    for steps, value in ((1, 1), (2, 3)):
        graph.replay()
        assert x.tolist() == [value] * 4 and z.unique().tolist() == [value + 10], steps
    scale.fill_(3)
    graph.replay()
    assert y.is_cuda and y.unique().tolist() == [21]
    add()
    assert x[0] == 8


def test_an_operator_of_the_script_is_replayed_as_a_whole():
    x = torch.zeros(4, device="cuda")

    @torch.library.custom_op("cutex_test::bump", mutates_args=["t"], device_types="cuda")
    def bump(t: torch.Tensor) -> None:
        Kernel(t)()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bump(x)
    assert x.sum() == 0
    graph.replay()
    graph.replay()
    assert x.tolist() == [2] * 4


def test_a_graph_out_of_turn_is_refused():
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captured nothing"):
        graph.replay()
    with pytest.raises(RuntimeError, match="not being captured"):
        graph.capture_end()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="captured already"):
        torch.cuda.CUDAGraph().capture_begin()
