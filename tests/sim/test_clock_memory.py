"""The clock of kernels that load by ordinary instructions and by cp.async: memory binds where it
should, and loads overlap.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import styled_kernels
import torch
from cutlass import Int32, cute

from cutex.sim import simulate
from cutex.sim.host.loaded import captured
from cutex.sim.timing import stored
from cutex.sim.timing.call import time_call
from cutex.sim.timing.events import Fetch, Fetched, Load, Need
from cutex.sim.timing.gpus import gpu
from cutex.sim.timing.trace import trace
from cutex.sim.timing.traffic import fetched, held_by_l2

HBM = gpu("h200").hbm_gbs * 1e3  # bytes a microsecond
LAUNCH = 1.0  # microseconds, of the launch and the first loads


def predicted(kernel: str, *tensors: torch.Tensor) -> float:
    """The microseconds of all its launches."""
    found = captured(getattr(styled_kernels, kernel), tensors, "sm_90a")
    return sum(report.us for report in time_call(*found))


def recorded(kernel: str, *tensors: torch.Tensor):
    found = captured(getattr(styled_kernels, kernel), tensors, "sm_90a")
    return trace(*found, look=False)[-1]


def test_a_large_elementwise_kernel_takes_the_time_of_its_bytes():
    n = 1 << 22
    x = torch.zeros(n)
    least = 3 * 4 * n / HBM
    assert least < predicted("add", x, x.clone(), x.clone()) < 1.15 * least + LAUNCH


def test_a_small_one_takes_little_more_than_a_launch():
    x = torch.zeros(1000)
    assert LAUNCH < predicted("add", x, x.clone(), x.clone()) < 3


def test_two_loads_of_a_thread_take_the_time_of_one():
    """They are needed together, and so waited for once."""
    x = torch.zeros(1000)
    program = recorded("add", x, x.clone(), x.clone()).record.programs[0]
    kinds = [type(e) for e in program if isinstance(e, Fetch | Need)]
    assert kinds == [Fetch, Fetch, Need]
    assert next(e for e in program if isinstance(e, Need)).loads == 2


def test_a_box_that_a_cluster_loads_again_soon_comes_from_l2():
    box = [Load((), 100, (7, x), 1) for x in range(2)]
    record = SimpleNamespace(programs={0: [box[0], box[1], box[0]], 1: [box[1]]})
    assert held_by_l2(record, near=1000) == {7: 0.5}
    assert held_by_l2(record, near=100) == {7: 0.25}


def test_what_all_ctas_load_comes_from_memory_once():
    x = torch.zeros(6 * styled_kernels.THREADS)
    traced = recorded("last", x, torch.zeros(6), torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    (row,) = traced.record.fetched.values()
    assert row == Fetched(4 * styled_kernels.THREADS, 4 * styled_kernels.THREADS, 4 * x.numel())
    assert list(fetched(traced).values()) == [1.0]
    record = traced.record
    record.fetched = {1: Fetched(1000.0, 1000.0, 1000.0)}  # by each of the six
    assert fetched(traced) == {1: pytest.approx(1 / 6)}


def test_copies_by_cp_async_are_waited_for_by_their_group(tmp_path):
    x = torch.zeros(4 * styled_kernels.THREADS + 2)
    traced = recorded("stencil", x, torch.zeros(4 * styled_kernels.THREADS))
    program = traced.record.programs[0]
    copies = [e for e in program if isinstance(e, Fetch)]
    assert len(copies) >= 8 and not any(c.registers for c in copies)  # four tiles, and their tails
    stored.save({"stencil": traced}, tmp_path / "one.json.gz")
    again = stored.load(tmp_path / "one.json.gz")["stencil"]
    assert json.dumps(again.record.programs[0]) == json.dumps(program)
    assert again.record.fetched == traced.record.fetched
    one = predicted("stencil", x[: styled_kernels.THREADS + 2], torch.zeros(styled_kernels.THREADS))
    four = predicted("stencil", x, torch.zeros(4 * styled_kernels.THREADS))
    assert one < four < one + 3 * 0.5, "the next tile is loaded while this one is added up"


@cute.kernel
def meeting_kernel(mCount: cute.Tensor):
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.atomic_add(mCount.iterator, Int32(1), sem="acq_rel", scope="gpu")
        count = Int32(0)
        while count < cute.arch.grid_dim()[0]:
            count = cute.arch.load(mCount.iterator, Int32, sem="acquire", scope="gpu")


@cute.jit
def meeting(mCount: cute.Tensor):
    meeting_kernel(mCount).launch(grid=[4, 1, 1], block=[32, 1, 1])


def test_a_grid_that_waits_for_itself_has_no_time_in_one_sentence():
    count = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"one cluster of .*meeting.* does not come to its end alone"
    ):
        time_call(*captured(meeting, [count], "sm_90a"))
    assert count.item() == 0, "what the record has written is put back"
    assert not simulate(meeting, count, arch="sm_90a").findings and count.item() == 4
