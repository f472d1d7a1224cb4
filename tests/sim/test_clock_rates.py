"""What the clock charges for instructions and accesses, where a probe on an H200 gave another rate
than tables do (docs/facts/timing.md).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.arch import ARCHS
from cutex.sim.host.loaded import captured
from cutex.sim.machine.residency import held
from cutex.sim.timing.events import Event, Fetch, Need, Touch, Work
from cutex.sim.timing.gpus import gpu
from cutex.sim.timing.machine_code import ALU, FMA, FP64, LSU, MMA, MUFU, UNIFORM, Sass, costs
from cutex.sim.timing.sampled import Sampled
from cutex.sim.timing.touches import Together
from cutex.sim.timing.trace import trace
from cutex.sim.timing.traffic import fetched
from cutex.sim.timing.units import Sm


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


@pytest.mark.parametrize(("copies", "executed"), [(1, 1), (2, 2), (25, 1)])
def test_a_loop_of_integers_tells_its_copies_by_most_of_its_lines(copies, executed) -> None:
    """One line is of 64 bits, and so two instructions a turn: two of one line tell nothing."""
    turn = [("IMAD", 2), ("SHF.R.U32.HI", 3), ("LOP3.LUT", 4), ("IADD3", 5), ("IADD3.X", 5)]
    code = [("IMAD", 1), *turn * copies, ("STG.E", 6)]
    sass = [Sass(16 * i, x, line, 1, (), 0, 1) for i, (x, line) in enumerate(code)]
    found = costs(sass, loops={1: 0, 2: 2, 3: 2, 4: 2, 5: 2, 6: 0})
    slots = [found[line].slots for line in range(1, 7)]
    np.testing.assert_allclose(slots, [1, executed, executed, executed, 2 * executed, 1])


@cute.kernel
def touching_kernel(mX: cute.Tensor, mY: cute.Tensor):
    t = cute.arch.thread_idx()[0]
    mY[t * 8] = Float32(1.0)  # a word of each sector
    mY[512 + t] = Float32(2.0)  # all of four
    x = mX[t * 1024]  # one word of 4 KB, and one of the other half of 64 bytes for each second
    mY[1024 + t // 8 * 16 + t % 8] = x + mX[t % 16 * 1024 + 8]  # every second sector
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
    loads = [e for e in program if isinstance(e, Fetch)]
    assert [(e.sectors, e.alone, e.asked) for e in loads] == [(32, 16, 128), (16, 0, 64)]


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


@pytest.mark.sweep(3)
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


def test_stores_into_the_last_lines_of_a_warp_are_put_together() -> None:
    """Words 8 bytes apart and those between them are whole sectors; 32 bytes apart they are not."""
    halves, eights, together = np.arange(32) * 8, np.arange(32) * 32, Together()
    program: list[Event] = []
    for at in (halves, halves + 4, eights, eights + 4):
        program.append(together.store(0, 0, 4096 + at, 4, program))
    assert [(e.sectors, e.partial) for e in program] == [(8, 0), (0, 0), (32, 32), (32, 32)]
    assert [(e.packets, e.again) for e in program] == [(0, 0), (0, 0), (8, 8), (8, 32)]
    apart = Together()
    for waits in (False, True):
        program = [apart.store(waits, 0, 4096 + halves, 4, [])]
        program += [Need(1)] * waits
        program.append(apart.store(waits, 0, 4100 + halves, 4, program))
        assert program[-1].sectors == 8 * waits  # type: ignore[union-attr]
    quads = np.arange(32) // 4 * 1024 + np.arange(32) % 4 * 4  # as of accumulators: half a sector
    assert together.store(0, 1, quads, 4, program).packets == 0
    assert together.store(0, 1, np.arange(32) * 1024, 4, program).packets == 32


def test_of_loads_of_which_a_part_misses_each_waits_or_does_not() -> None:
    sm = Sm(0)
    assert sum(sm.misses(0.25) for _ in range(400)) == 100
    assert not any(Sm(0).misses(0.0) for _ in range(9)) and all(sm.misses(1.0) for _ in range(9))


def test_clusters_whose_instructions_are_counted_take_the_time_that_those_tell() -> None:
    """By the issue slots of the recorded ones, beyond which the line goes on."""
    slots = {0: 100.0, 5: 300.0}
    idle = Work(*(0.0 for _ in Work._fields))
    programs = {n: {0: [idle._replace(slots=s)]} for n, s in slots.items()}
    records = {n: SimpleNamespace(flops=0, programs=p) for n, p in programs.items()}
    first = SimpleNamespace(clusters=6)
    counted = {0: 100.0, 1: 100.0, 2: 500.0, 3: 100.0, 4: 200.0, 5: 300.0}
    times = Sampled(first, records, counted=counted).times([1100.0, 1300.0])  # type: ignore[arg-type]
    assert times.tolist() == pytest.approx([1100, 1100, 1500, 1100, 1200, 1300])
    plain = Sampled(first, records).times([1100.0, 1300.0])  # type: ignore[arg-type]
    assert plain.tolist() == pytest.approx([1100, 1140, 1180, 1220, 1260, 1300])


@pytest.mark.parametrize("of_cta, ctas", [  # warps, smem, registers of a thread, columns
    ((1, 0, 16), 32), ((4, 0, 33), 12), ((3, 0, 168), 4), ((8, 48 << 10), 4), ((4, 0, 32, 128), 4),
])  # fmt: skip
def test_an_sm_holds_as_many_ctas_as_it_has_room_for(of_cta, ctas) -> None:
    """At most 32; a warp's registers come in units of 256, and each sub-core has a quarter."""
    assert held(ARCHS["sm_90a"], *of_cta)[0] == ctas
