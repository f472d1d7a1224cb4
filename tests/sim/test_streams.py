"""Work of a script on several streams, each race beside a twin that something orders."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ptx_kernel import Shape, module

from cutex.arch import arch
from cutex.sim.host.calls import Calls
from cutex.sim.host.capture import HostTensor
from cutex.sim.host.torch_stand_in import torch_on_cpu
from cutex.sim.ptx.parse import parse

ADD_ONE = "ld.global.u32 %r1, [%x_i]; add.u32 %r1, %r1, 1; st.global.u32 [%y_i], %r1;"
COPY = """.reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p0, %i, 0; add.u32 %r9, bar, 16;
    @%p0 mbarrier.init.shared.b64 [bar], 1;
    bar.sync 0; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%x], 128, [bar];
    W: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0;
    @!%p2 bra W; shl.b32 %r2, %i, 2; add.u32 %r9, %r9, %r2; ld.shared.u32 %r1, [%r9];
    add.u32 %r1, %r1, 1; st.global.u32 [%y_i], %r1;"""


class Script:
    """What a script has: three tensors of 64 words, two streams, and a kernel that adds one."""

    def __init__(self, calls: Calls, body: str) -> None:
        self.calls, self.x, self.y, self.z = calls, *(self.zeros() for _ in range(3))
        arrays = {name: np.zeros(64, np.int32) for name in "xy"}
        self.programs = parse(module(body, arrays, Shape(smem=256), "sm_90a", ""))
        torch.cuda.synchronize()
        self.a, self.b = torch.cuda.Stream(), torch.cuda.Stream()

    @staticmethod
    def zeros() -> torch.Tensor:
        return torch.zeros(64, device="cuda", dtype=torch.int32)

    def add(self, to: torch.Tensor, of: torch.Tensor, stream: Any = None) -> None:
        """to[:32] = of[:32] + 1."""
        values = [ctypes.c_uint64(t.data_ptr()) for t in (of, to)]
        params = (ctypes.c_void_p * 2)(*[ctypes.addressof(v) for v in values])
        host = lambda _, launch: launch(Shape(smem=256).launch("snippet", params))
        function = SimpleNamespace(host=host, programs=self.programs, ptx="")
        with torch._C.DisableTorchFunction():  # to see the tensors' real devices
            tensors = [HostTensor.of(of, "of"), HostTensor.of(to, "to")]
        self.calls.run(function, [], tensors, None if stream is None else stream.cuda_stream)


@pytest.fixture
def script() -> Iterator[Script]:
    with torch_on_cpu(arch("sm_90a")) as memory:
        yield Script(Calls("fifo", 0, memory), ADD_ONE)


@pytest.fixture
def copies() -> Iterator[Script]:
    with torch_on_cpu(arch("sm_90a")) as memory:
        yield Script(Calls("fifo", 0, memory), COPY)


def two(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    s.add(s.z, s.y, s.b)


def early(s: Script) -> None:
    event = s.a.record_event()
    s.add(s.y, s.x, s.a)
    s.b.wait_event(event)
    s.add(s.z, s.y, s.b)


def write_after_read(s: Script) -> None:
    s.add(s.z, s.y, s.a)
    s.add(s.y, s.x, s.b)


def default_first(s: Script) -> None:
    s.add(s.y, s.x)
    with torch.cuda.stream(s.a):
        s.add(s.z, s.y)


def of_one_half(s: Script) -> None:
    s.add(s.y[32:], s.x, s.a)
    s.add(s.y[16:], s.x, s.b)


@pytest.mark.parametrize("work", [two, early, write_after_read, default_first, of_one_half])
def test_launches_of_two_streams_that_nothing_orders_race(script, work):
    work(script)
    (found,) = script.calls.report.findings
    assert found.rule == "race" and "nothing orders the two streams" in found.message
    assert script.calls.failed and not script.calls.report.advisories


def waits(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    s.b.wait_stream(s.a)
    s.add(s.z, s.y, s.b)


def waits_for_an_event(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    event = torch.cuda.Event()
    event.record(s.a)
    with torch.cuda.stream(s.b):
        event.wait()
        s.add(s.z, s.y)


def host_waits(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    s.a.synchronize()
    s.add(s.z, s.y, s.b)


def by_a_third(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    torch.cuda.current_stream().wait_stream(s.a)
    s.b.wait_stream(torch.cuda.default_stream())
    s.add(s.z, s.y, s.b)


def halves(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    s.add(s.y[32:], s.x, s.b)


def only_read(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    s.add(s.z, s.x, s.b)


def other_tensors(s: Script) -> None:
    for stream in (s.a, s.b):  # perhaps at one address, one after the other
        with torch.cuda.stream(stream):
            x, y = s.zeros(), s.zeros()
            s.add(y, x)
            assert y.sum().item() == 32
            del x, y


def result_behind_a_wait(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    torch.cuda.current_stream().wait_stream(s.a)
    assert s.y.sum().item() == 32
    s.add(s.y, s.x, s.b)  # the host has seen it


def graph(s: Script) -> None:
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        s.a.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s.a):
            s.y.copy_(s.x)
        torch.cuda.current_stream().wait_stream(s.a)
    with torch.cuda.stream(s.b):
        captured.replay()
        s.add(s.z, s.y)


@pytest.mark.parametrize("work", [
    waits, waits_for_an_event, host_waits, by_a_third, halves, only_read, other_tensors,
    result_behind_a_wait, graph,
])  # fmt: skip
def test_ordered_launches_are_clean(script, work):
    work(script)
    assert not script.calls.report.findings and not script.calls.report.advisories


def read_too_early(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    s.y.sum()


def filled_on_another(s: Script) -> None:
    s.x.fill_(3)
    s.add(s.y, s.x, s.a)


def overwritten(s: Script) -> None:
    s.add(s.y, s.x, s.a)
    s.x[3] = 1


@pytest.mark.parametrize("work", [read_too_early, filled_on_another, overwritten])
def test_functions_of_torch_beside_a_launch_are_advisories(script, work):
    work(script)
    (only,) = script.calls.report.advisories
    assert "torch's " in only.message and "nothing orders the two streams" in only.message
    assert not script.calls.failed


def test_what_bulk_copies_read_counts(copies):
    halves(copies)
    assert not copies.calls.failed
    two(copies)
    assert [f.rule for f in copies.calls.report.findings] == ["race"]
