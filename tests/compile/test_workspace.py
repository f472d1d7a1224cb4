"""The memory that kernels need beside their operands: its owner, and its use under graph
capture."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver

import cutex
from cutex.compile import Workspace
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.ops import workspace
from cutex.ops.matmul import choices
from cutex.ops.matmul.plan import forget

GPU = torch.device("cuda", 0)

Take = Callable[[int], torch.Tensor]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The current stream of a GPU by name only, whose memory is the CPU's."""
    now = SimpleNamespace(handle=7, capture=0, zeroed=0)

    def zeros(device: torch.device, count: int) -> torch.Tensor:
        now.zeroed += 1
        return torch.zeros(count, dtype=torch.int32)

    for name in ("_flags", "_sums", "_reserves", "_captured", "_scratch"):
        monkeypatch.setattr(workspace, name, {})
    monkeypatch.setattr(workspace, "_zeros", zeros)
    # on a GPU in a thread of its own, on the current stream
    monkeypatch.setattr(workspace, "allocated_apart", lambda allocate, device: allocate())
    monkeypatch.setattr(
        torch._C, "_cuda_isCurrentStreamCapturing", lambda: now.capture > 0, raising=False
    )
    raw = "_cuda_getCurrentRawStream"  # which torch has not, if it was built without CUDA
    monkeypatch.setattr(torch._C, raw, lambda index: now.handle, raising=False)
    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", lambda _: (0, 1, now.capture, None))
    return now


@pytest.fixture(params=["flags", "flags_of"])
def take(request: pytest.FixtureRequest, stream: SimpleNamespace) -> Take:
    """So many flags for the next launch, by either function."""
    if request.param == "flags":
        return lambda count: workspace.flags(GPU, count)
    kept = {count: workspace.flags_of(GPU, count) for count in (2, 8)}
    return lambda count: kept[count]()


def apart(*tensors: torch.Tensor) -> bool:
    """Whether no two tensors share memory."""
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors)
    return all(a[1] <= b[0] for a, b in pairwise(spans))


def test_launches_of_a_stream_share_flags_and_streams_do_not(
    stream: SimpleNamespace, take: Take
) -> None:
    first = take(8)
    assert take(8) is first
    of_others = take(2)
    stream.handle = 9
    assert apart(first, of_others, take(8))


def test_a_capture_takes_flags_of_its_own_and_zeroes_none(
    stream: SimpleNamespace, take: Take
) -> None:
    eager = take(8)
    zeroed, stream.capture = stream.zeroed, 1
    first = take(8)
    assert take(8) is first, "launches of one capture and stream follow each other"
    stream.handle = 9
    forked = take(8)
    stream.handle, stream.capture = 7, 2
    assert apart(eager, first, forked, take(8))
    assert stream.zeroed == zeroed, "nothing is zeroed in the graph"


@pytest.mark.parametrize("error", [0, 1], ids=["all are taken", "no capture is known"])
def test_where_no_flags_are_left_a_graph_zeroes_its_own(
    stream: SimpleNamespace, take: Take, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "RESERVE", 64 if error else 12)
    eager = take(8)
    stream.capture = 1
    first = take(8)
    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", lambda _: (error, 1, 2, None))
    zeroed = stream.zeroed
    second = take(8)
    assert stream.zeroed == zeroed + 1 and apart(eager, first, second)
    stream.capture = 0
    take(8)
    stream.capture = 3
    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", lambda _: (0, 1, 3, None))
    zeroed = stream.zeroed
    assert apart(first, second, take(8)) and stream.zeroed == zeroed


def test_buffers_are_kept_for_a_stream_until_they_are_too_small(
    stream: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda count, dtype, device: made(count, dtype=dtype))
    kept = [workspace.buffers_of(Workspace(sums, 8), GPU) for sums in (100, 200)]
    assert all(map(operator.is_, kept[0](), kept[0]()))
    few, many = (lambda of=of: [torch.from_dlpack(x) for x in of()] for of in kept)
    first = few()
    larger = many()
    assert larger[0].numel() >= 200 and larger[1].data_ptr() == first[1].data_ptr()
    assert few()[0].data_ptr() == larger[0].data_ptr()
    stream.handle = 9
    assert apart(*larger, *few())
    stream.capture = 1
    assert apart(*larger, *few(), *many()[:1]), "a capture has its own"


def test_what_nobody_is_given_is_a_streams_and_a_launch_has_it_apart(
    stream: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: made(shape, dtype=dtype))
    kind = (9,), (1,), torch.float32, lambda shape, strides, dtype: made(shape, dtype=dtype)
    one, two, again = (workspace.scratch_of(GPU, name, *kind) for name in ("x1", "x2", "x1"))
    first = [torch.from_dlpack(of()) for of in (one, two)]
    assert apart(*first) and again() is one()
    stream.handle = 9
    assert apart(*first, torch.from_dlpack(one()))
    stream.capture = 1
    assert apart(*first, one(), one()), "replays may run beside each other"


@pytest.mark.gpu
def test_graphs_and_streams_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call is replayed beside calls of another stream, on Hopper with stream-K."""
    tiles = Sm90Config(
        tile_m=128, tile_n=128, num_stages=5, epi_n=64, epi_stages=2, warpgroups=2, stream_k=2
    )
    monkeypatch.setattr(choices, "preferred", lambda calls: tiles)
    forget()
    x = torch.randint(-2, 3, (512, 4096), device="cuda").bfloat16()
    w = torch.randint(-2, 3, (3072, 4096), device="cuda").bfloat16()
    want = cutex.matmul(x, w.mT)
    assert torch.equal(want, (x.double() @ w.double().mT).bfloat16())
    out, graph = torch.empty_like(want), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            cutex.matmul(x, w.mT, out=out)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        out.zero_()
        graph.replay()
        with torch.cuda.stream(other):
            beside = cutex.matmul(x, w.mT)
        torch.cuda.synchronize()
        assert torch.equal(out, want) and torch.equal(beside, want)
    assert not any(x.any() for x in (*workspace._flags.values(), *workspace._captured.values()))
    forget()


def test_a_simulated_launch_that_fails_leaves_no_flags() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="a race"), cutex.ops.simulated("sm_90a"):
        workspace.flags(cpu, 3).fill_(5)
        raise RuntimeError("a race")
    assert not workspace.flags(cpu, 3).any()
