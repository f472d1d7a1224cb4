"""What the clock charges for instructions and accesses, where a probe on an H200 gave another rate
than tables do (docs/facts/timing.md).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.sim.host.loaded import captured
from cutex.sim.timing.events import Fetch, Touch, Work
from cutex.sim.timing.gpus import gpu
from cutex.sim.timing.machine_code import ALU, FMA, FP64, LSU, MMA, MUFU, UNIFORM, Sass, costs
from cutex.sim.timing.trace import trace
from cutex.sim.timing.traffic import fetched


@pytest.mark.parametrize(
    ("opcode", "pipe", "cycles"),
    [
        ("IMAD", FMA, 2.0),
        ("IMAD.WIDE.U32", FMA, 4.0),
        ("I2FP.F32.S32", ALU, 2.0),
        ("F2IP.U8.F32.NTZ", ALU, 2.0),
        ("I2F.U8", MUFU, 8.0),
        ("F2I.NTZ", MUFU, 8.0),
        ("DFMA", FP64, 2.0),
        ("REDUX.SUM", UNIFORM, 8.0),
        ("HMMA.16816.F32.BF16", MMA, 6.2),
        ("HMMA.1688.F32.BF16", MMA, 4.4),
        ("HMMA.1688.F32.TF32", MMA, 6.2),
        ("LDG.E", LSU, 8.0),
        ("LDGSTS.E.BYPASS.128", LSU, 4.0),
        ("ATOMS.ADD", LSU, 4.0),
        ("ATOMS.CAS", LSU, 8.0),
    ],
)
def test_an_instruction_keeps_its_pipe_busy(opcode: str, pipe: str, cycles: float) -> None:
    (cost,) = costs([Sass(0, opcode, 1, 1, (), 0, 1)]).values()
    assert {p: c for p, c in cost.pipes.items() if c} == {pipe: cycles}


def test_of_a_loop_that_is_unrolled_whole_one_copy_is_executed() -> None:
    """Its copies stand in one block with what comes before and behind it."""
    turn = [("LDS", 2), ("FADD", 3), ("DEPBAR", 4), ("LDS", 4)]
    code = [("STS", 1), *turn * 8, ("STG.E", 5)]
    sass = [Sass(16 * i, x, line, 1, (), 0, 1) for i, (x, line) in enumerate(code)]
    found = costs(sass, loops={1: 0, 2: 2, 3: 2, 4: 2, 5: 0})
    assert {line: cost.slots for line, cost in found.items()} == {1: 1, 2: 1, 3: 1, 4: 2, 5: 1}


@cute.kernel
def touching_kernel(mX: cute.Tensor, mY: cute.Tensor):
    t = cute.arch.thread_idx()[0]
    mY[t * 8] = Float32(1.0)  # a word of each sector
    mY[512 + t] = Float32(2.0)  # all of four
    mY[1024 + t // 8 * 16 + t % 8] = mX[t * 1024]  # every second sector; one word of 4 KB
    cute.arch.atomic_add(mY.iterator, Float32(1.0), scope="gpu")
    cute.arch.atomic_add(mY.iterator + 512 + t, Float32(1.0), scope="gpu")
    cute.arch.atomic_add(mY.iterator + 512 + t // 2 * 8, Float32(1.0), scope="gpu")


@cute.jit
def touching(mX: cute.Tensor, mY: cute.Tensor):
    touching_kernel(mX, mY).launch(grid=[1, 1, 1], block=[32, 1, 1])


def zeros(n: int) -> torch.Tensor:
    """Floats at a line of 128 bytes."""
    x = torch.zeros(n + 32)
    begin = -x.data_ptr() // x.itemsize % 32
    return x[begin : begin + n]


def test_stores_of_parts_of_sectors_and_lanes_that_add_to_one_word_are_told_apart() -> None:
    x, y = zeros(1 << 15), zeros(2048)
    traced = trace(*captured(touching, (x, y), "sm_90a"), look=False)[-1]
    (program,) = traced.record.programs.values()
    stores = [e for e in program if isinstance(e, Touch) and not (e.waits or e.adds)]
    assert [(e.sectors, e.partial) for e in stores] == [(32, 32), (4, 0), (4, 0)]
    added = [e for e in program if isinstance(e, Touch) and (e.waits or e.adds)]
    assert [e.queued for e in added] == [32, 0, 2 * 16]
    (load,) = (e for e in program if isinstance(e, Fetch))
    assert (load.sectors, load.alone, load.asked) == (32, 32, 128)


def test_what_a_gather_finds_in_l2_is_what_l2_keeps_of_the_tensor() -> None:
    x, y = zeros(1 << 15), zeros(2048)
    traced = trace(*captured(touching, (x, y), "sm_90a"), look=False)[-1]
    board = gpu("h200")
    (row,) = traced.record.fetched.values()
    for size, share in ((1e6, 0.0), (2 * board.l2_kept, 0.5)):
        at = next(iter(traced.record.fetched))
        traced.record.fetched = {at: row._replace(size=size, different=1.0, loaded=1024.0)}
        found = fetched(traced, board)[at]
        assert found.scattered == pytest.approx(max(share, found.first))


@cute.kernel
def counting_kernel(mX: cute.Tensor, mY: cute.Tensor):
    bins = SmemAllocator().allocate_tensor(Int32, cute.make_layout(1024))
    t = cute.arch.thread_idx()[0]
    cute.arch.atomic_add(bins.iterator + mX[t], Int32(1), scope="cta")
    mY[t] = Int32(1)


@cute.jit
def counting(mX: cute.Tensor, mY: cute.Tensor):
    counting_kernel(mX, mY).launch(grid=[1, 1, 1], block=[32, 1, 1])


@pytest.mark.parametrize(
    ("bins", "cycles"),
    [
        (np.arange(32), 1),
        (np.arange(32) * 32, 32),  # of one bank
        (np.arange(32) // 2 * 32, 16),  # and in pairs
    ],
)
def test_an_atomic_in_shared_memory_passes_the_port_once(bins: np.ndarray, cycles: int) -> None:
    found = []
    for at in (bins, np.zeros(32)):
        x = torch.tensor(at, dtype=torch.int32)
        traced = trace(*captured(counting, (x, x.clone()), "sm_90a"), look=False)[-1]
        (program,) = traced.record.programs.values()
        found.append(sum(e.port for e in program if isinstance(e, Work)))
    assert found[0] - found[1] == cycles - 1
