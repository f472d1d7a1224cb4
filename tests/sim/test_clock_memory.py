"""The clock of kernels that load by ordinary instructions and by cp.async: memory binds where it
should, and loads overlap.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import hypot
from types import SimpleNamespace

import cutlass
import numpy as np
import pytest
import styled_kernels
import torch
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.sim import simulate
from cutex.sim.host.loaded import captured
from cutex.sim.machine.events import SharedBytes
from cutex.sim.timing import stored
from cutex.sim.timing.call import time_call, time_launch
from cutex.sim.timing.events import (
    Added,
    Arrive,
    Event,
    Fetch,
    Fetched,
    Load,
    Mma,
    Need,
    Record,
    Store,
    Touch,
    Wait,
    Work,
)
from cutex.sim.timing.fetches import LINE, SECTOR, Fetches, Reuse, spread
from cutex.sim.timing.gpus import gpu
from cutex.sim.timing.power import watts
from cutex.sim.timing.predict import predict
from cutex.sim.timing.replay import Replay
from cutex.sim.timing.sampled import Sampled
from cutex.sim.timing.timeline import Timeline
from cutex.sim.timing.trace import Traced, trace
from cutex.sim.timing.traffic import fetched, held_by_l2, slices
from cutex.sim.timing.units import Crowd, Memory, Missed
from cutex.sim.timing.wavefronts import l1_cycles, port_cycles

HBM = gpu("h200").hbm_gbs * 1e3  # bytes a microsecond
LAUNCH = 1.0  # microseconds, of the launch and the first loads


def predicted(kernel: str, *tensors: torch.Tensor) -> float:
    """The microseconds of all its launches."""
    found = captured(getattr(styled_kernels, kernel), tensors, "sm_90a")
    return sum(report.us for report in time_call(*found))


def recorded(kernel: str, *tensors: torch.Tensor):
    found = captured(getattr(styled_kernels, kernel), tensors, "sm_90a")
    return trace(*found, look=False)[-1]


def at_a_line(n: int) -> torch.Tensor:
    """n zeros that begin with a line of 128 bytes, as a GPU's memory does and a CPU's need not."""
    x = torch.zeros(n + 32)
    begin = -x.data_ptr() // x.itemsize % 32
    return x[begin : begin + n]


@cute.kernel
def neighbours_kernel(mX: cute.Tensor, mY: cute.Tensor):
    at = cute.arch.thread_idx()[0]
    mY[at] = mX[at] + mX[at + 1] + mX[at + 2]


@cute.jit
def neighbours(mX: cute.Tensor, mY: cute.Tensor):
    neighbours_kernel(mX, mY).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_loads_that_follow_each_other_are_under_way_together_and_l1_keeps_lines():
    """The PTX adds up after each, the machine code after the last."""
    found = captured(neighbours, (at_a_line(34), at_a_line(32)), "sm_90a")
    (program,) = trace(*found, look=False)[-1].record.programs.values()
    loads = [e for e in program if isinstance(e, (Fetch, Need))]
    assert [type(e) for e in loads] == [Fetch, Fetch, Fetch, Need]
    first, second, third = loads[:3]
    assert (first.lines, first.held, second.lines + third.lines) == (1, 0, 1)
    assert first.sectors + second.sectors + third.sectors == 5 and second.held + third.held == 3


@cute.kernel
def staged_kernel(mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """Each round stages four rows in shared memory: a load, a store, a load, a store."""
    sX = SmemAllocator().allocate_tensor(Float32, cute.make_layout((32, 4)))
    thread, total = cute.arch.thread_idx()[0], Float32(0.0)
    for k in cutlass.range(rounds, unroll=1):
        for i in cutlass.range_constexpr(4):
            sX[thread, i] = mX[k * 128 + i * 32 + thread]
        total += sX[thread, k % 4]
    mY[thread] = total


@cute.jit
def staged(mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    staged_kernel(mX, mY, rounds).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_a_round_waits_for_its_loads_before_the_next_begins():
    """The machine code has all loads of a round before its stores, and no load of the next."""
    found = captured(staged, (at_a_line(512), at_a_line(32), 4), "sm_90a")
    (program,) = trace(*found, look=False)[-1].record.programs.values()
    kinds = [type(e) for e in program]
    last = [n for n, (a, b) in enumerate(pairwise(kinds)) if a is Need and b is not Need]
    assert len(last) == 4
    waits, loads = last[1], kinds.index(Fetch, last[1])
    issued = max(n for n in range(waits) if kinds[n] is Fetch)

    def cycles(events: list[Event]) -> float:
        return sum(e.cycles for e in events if isinstance(e, Work))

    assert cycles(program[issued:waits]) < 0.3 * cycles(program[waits:loads])


@pytest.mark.slow
def test_a_large_elementwise_kernel_takes_the_time_of_its_bytes():
    n = 1 << 21
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


def test_a_stored_record_knows_which_boxes_are_the_same(tmp_path):
    """And one of a file that names the tensors alone has none that L2 holds."""
    box = [Load((), 100, (7, x), 1) for x in range(2)]
    traced = one_warp([box[0], box[1], box[0]])
    stored.save({"one": traced}, tmp_path / "one.json.gz")
    again = stored.load(tmp_path / "one.json.gz")["one"]
    assert held_by_l2(again.record, near=1000) == held_by_l2(traced.record, near=1000)
    old = SimpleNamespace(
        programs={0: [e._replace(source=(7,)) for e in traced.record.programs[0]]}
    )
    assert held_by_l2(old, near=1000) == {7: 0.0}


def one_warp(program):
    """The record of a warp with this program."""
    flops = sum(e.flops for e in program if isinstance(e, Mma))
    record = Record({0: program}, {}, {0: 0}, {0: 0}, 1, 1, 1, True, flops)
    return Traced(record, (1, 1, 1), 1, {})


def test_warps_of_ctas_side_by_side_are_on_all_sub_cores():
    program = [Work(*[100.0, 100.0, *[0.0] * (len(Work._fields) - 2)])]
    run = Replay(one_warp(program).record, gpu("h200"), Memory(0.0, 1), rounds=4, slots=4).run()
    assert run.end == 100.0


def test_sums_stay_in_l2_and_stores_go_on_to_memory():
    """More than HBM can take: only plain stores wait for it."""
    slow = replace(gpu("b200"), hbm_gbs=gpu("b200").hbm_gbs / 1000, write_buffer=0.0)
    plain, added = (
        predict(one_warp([Store(4096, adds)] * 64), slow).cycles for adds in (False, True)
    )
    assert plain > 5 * added
    timed = predict(one_warp([Store(4096, True), Store(4096), Touch(1, 1, False, True)]), slow)
    assert (timed.stored, timed.written) == (2 * 4096 + 32, 4096)


def test_a_cycle_of_the_tensor_cores_takes_one_energy_whatever_the_operands():
    """So twice the FLOPs of operands half as wide; 64 rows of one CTA, at half the rate, take as
    much a FLOP as 128."""
    board = gpu("b200")
    timed = {
        (flops, rate): predict(one_warp([Mma(0, 0, flops, 0, (0,), rate)] * 64), board)
        for flops, rate in ((1 << 20, 1.0), (1 << 21, 2.0), (1 << 22, 4.0), (1 << 20, 0.5))
    }
    found = [watts(t, board, 1.5) for t in timed.values()]
    assert found[:3] == [pytest.approx(found[0])] * 3
    assert found[3] == pytest.approx(found[0]) and found[0] > board.power.idle_w + 10


@pytest.mark.parametrize(
    ("offsets", "cycles"),
    [
        (np.zeros(32, int), 2.6),  # one place for all lanes
        (16 * (np.arange(32) // 8), 2.6),  # four places, each for neighbours
        (16 * (np.arange(32) % 8), 4),  # eight, for lanes that are apart
        (16 * np.arange(32), 4),  # 512 bytes
        (128 * np.arange(32), 32),  # another row for each lane, all in four banks
    ],
)
def test_the_smem_port_takes_what_a_probe_measured(offsets, cycles):
    lanes = np.arange(32)
    at = SharedBytes(np.full(32, 5), lanes, np.zeros(32, int), offsets, 16)
    warps, found = port_cycles(at)
    assert (warps.tolist(), found.tolist()) == ([5], [cycles])


@pytest.mark.parametrize(
    ("stride", "size", "cycles"),
    [(4, 4, 1), (64, 4, 16), (256, 4, 32), (260, 4, 1), (272, 4, 4), (128, 16, 32), (48, 16, 4)],
)
def test_the_banks_of_l1_take_what_a_probe_measured(stride, size, cycles):
    """Rows that threads walk along: words a multiple of 128 bytes apart are all in one bank."""
    lanes = np.arange(32)
    assert (
        l1_cycles(4096 + 12 + stride * lanes if size == 4 else stride * lanes, lanes, size)
        == cycles
    )


def test_loads_of_one_bank_take_turns_even_where_l1_holds_them():
    traced = one_warp([Fetch(0, 0, 1, True, held=32, cached=True, asked=128, banks=32.0), Need(1)])
    alike = one_warp([Fetch(0, 0, 1, True, held=32, cached=True, asked=128, banks=1.0), Need(1)])
    slow, fast = (
        Replay(t.record, gpu("h200"), Memory(0.0, 132)).run().end for t in (traced, alike)
    )
    lines = 32 * gpu("h200").l1_line_cycles
    assert slow - fast == pytest.approx(hypot(32, lines) - hypot(1, lines))


def test_what_clusters_fetch_is_their_mean_between_the_first_and_the_last_byte():
    found = {
        0: {1: Fetched(100.0, 100.0, 1e6, span=(0.0, 500.0))},  # at an edge
        9: {1: Fetched(300.0, 200.0, 1e6, ((64.0, 30.0),), (2000.0, 2500.0))},
    }
    records = {n: SimpleNamespace(fetched=f) for n, f in found.items()}
    first = SimpleNamespace(clusters=10)
    means = Sampled(first, records).fetched()  # type: ignore[arg-type]
    assert means == {1: Fetched(200.0, 150.0, 2500.0, ((64.0, pytest.approx(20.0)),))}


def test_what_all_ctas_load_comes_from_memory_once():
    x = torch.zeros(6 * styled_kernels.THREADS)
    traced = recorded("last", x, torch.zeros(6), torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    (row,) = traced.record.fetched.values()
    size = 4 * styled_kernels.THREADS
    assert row == Fetched(size, size, 4 * x.numel(), span=(0.0, size))
    board = gpu("h200")
    assert [m.all for m in fetched(traced, board).values()] == [1.0]
    record = traced.record
    record.fetched = {1: Fetched(1000.0, 1000.0, 1000.0)}  # by each of the six
    assert fetched(traced, board)[1].all == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("between", "size", "share"),
    [
        (9e6, 1e9, 1 / 2),  # six times so much is in L2 still
        (12e6, 1e9, 3 / 4),  # of six times so much a half
        (15e6, 1e9, 1.0),  # six times so much is not
        (15e6, 2e7, 1 / 2),  # all of the tensor is
    ],
)
def test_what_a_cta_loads_again_comes_from_l2_while_that_keeps_it(between, size, share):
    x = torch.zeros(6 * styled_kernels.THREADS)
    traced = recorded("last", x, torch.zeros(6), torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    row = Fetched(2 * size / 6, size / 6, size, ((between, size / 6),))
    traced.record.fetched = {1: row}
    found = fetched(traced, gpu("h200"))[1]
    assert found.all == pytest.approx(share)
    assert found.first == 1.0 and found.again == pytest.approx(2 * share - 1)


def test_a_prediction_says_what_is_spilled(tmp_path):
    x = torch.zeros(6 * styled_kernels.THREADS)
    traced = recorded("last", x, torch.zeros(6), torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    assert traced.stack == 0 and "spilled" not in str(time_launch(traced, gpu("h200")))
    stored.save({"last": replace(traced, stack=64)}, tmp_path / "one.json.gz")
    report = time_launch(stored.load(tmp_path / "one.json.gz")["last"], gpu("h200"))
    assert "64 bytes of a thread are spilled" in str(report)
    assert json.loads(report.to_json())["stack_bytes"] == 64


def test_the_bytes_between_two_loads_of_the_same_are_counted():
    one = Reuse()
    for _ in range(2):
        one.fetch(list(range(8)))
    one.fetch([0])
    assert one.again == {8 * SECTOR: 9 * SECTOR}


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


def test_latencies_are_spread_about_their_mean_alike_in_each_replay():
    """Loads that are waited for one by one."""
    place, program = (0, 0), []
    for n in range(100):
        load = Load((place,), 128, (7, n), 1, (0,))
        program += [Arrive(place, 1, 128, False), load, Wait(place, n + 1, 1)]
    one = one_warp(program)
    one.record.barriers[place] = 1
    spread, even = gpu("b200"), replace(gpu("b200"), latency_spread=0.0)
    ends = [predict(one, board).cycles for board in (spread, spread, even)]
    assert ends[0] == ends[1] != ends[2]
    assert abs(ends[0] / ends[2] - 1) < spread.latency_spread / 5


def test_memory_that_is_busy_answers_later():
    """A queue in which requests of 10 cycles come every 20 holds as much as it is idle."""
    crowd = Crowd()
    for now in range(0, 40000, 20):
        found = crowd.add(float(now), 10.0)
    assert found == pytest.approx(1.0, rel=0.05)
    assert crowd.add(1e6, 10.0) < 1e-6  # long ago


def test_the_latest_of_many_sectors_counts():
    record = Record({}, {}, {}, {}, 1, 1, 1, True)
    timeline = Timeline(record, gpu("h200"), Memory(1.0, 1), log=False)
    mean = {n: sum(timeline.latest(n) for _ in range(4000)) / 4000 for n in (1, 16, 1000)}
    assert mean[1] == pytest.approx(0.98, abs=0.06) and mean[16] == pytest.approx(3.1, abs=0.1)
    assert mean[1000] == pytest.approx(4.0, abs=0.01)


def test_copies_into_padded_rows_spread_sectors_and_into_swizzled_ones_do_not():
    at = np.arange(32) * 16  # four rows of 128 bytes
    row = at // LINE
    assert spread(at // SECTOR, at) == spread(at // SECTOR, at ^ row % 8 * 16) == 0
    assert spread(at // SECTOR, at + row * 16) == 8  # those of every second row
    assert spread(at // SECTOR, at + row * 32) == 0


def test_sums_into_few_lines_take_turns_and_one_alone_takes_no_time():
    def end(count: int, slices: float) -> float:
        one = one_warp([Touch(4, 1, False, True, 4, sums=4.0)] * count).record
        return Replay(one, board, Memory(0.0, 132, slices=slices)).run().stores_end

    board = gpu("h200")
    assert end(1, 1.0) == end(1, 1e9)
    each = 4 * board.sum_sector * 132
    assert end(64, 1.0) == pytest.approx(63 * each + board.store_latency, rel=0.01)
    assert end(64, 1e9) < 0.1 * end(64, 1.0)


def test_stores_take_lines_of_l1_but_loads_that_are_issued_together_find_them():
    def found_again(run: tuple[int, int, int], lines: int) -> int:
        machine = SimpleNamespace(grid=SimpleNamespace(warp_cta=np.zeros(1, int)))
        f = Fetches(machine, [], lambda *_: None, {}, {}, l1=10.0 * LINE)  # type: ignore[arg-type]
        f.run[0] = (0, 0, 0)
        assert len(f._not_in_l1(0, np.arange(2))) == 2
        f.store(0, LINE * np.arange(1, 1 + lines))
        f.run[0] = run
        return 2 - len(f._not_in_l1(0, np.arange(2)))

    assert [found_again((0, 1, 0), lines) for lines in (4, 12)] == [2, 0]
    assert found_again((0, 0, 0), 12) == 2


def test_ctas_that_walk_along_the_same_bytes_all_wait_for_memory():
    """Of 16 that fetch a row in step one asks memory, and all wait; at random places few do."""
    row = Missed(all=1 / 16, first=1 / 16, together=16.0)
    assert row.waits(row.of(1.0), alone=0) == 1.0
    assert row.waits(row.of(1.0), alone=3) == 1 / 16
    record = SimpleNamespace(fetched={1: Fetched(4096.0, 4096.0, 4096.0 * 16)}, programs={})
    record.cluster_size = 1
    traced = SimpleNamespace(record=record, clusters=256, takes_over=False, per_sm=2)
    (missed,) = fetched(traced, gpu("h200")).values()  # type: ignore[arg-type]
    assert missed.together == 16.0 and missed.first == 1 / 16


@pytest.mark.parametrize("added, lines", [
    (Added(8.0, 0, 8, 8.0), 8.0),  # the same lines by all
    (Added(1.0, 0, 2048, 1.0), 1 + 1056 / 8),  # as segments lie, eight CTAs to a line
    (Added(4.0, 0, 2048, 2048.0), 2048.0),  # at random
])  # fmt: skip
def test_sums_of_ctas_side_by_side_meet_in_as_many_lines_as_these_have(added, lines):
    board = gpu("h200")
    record = SimpleNamespace(added=added, cluster_size=1)
    traced = SimpleNamespace(record=record, clusters=16384, takes_over=False, per_sm=8)
    found = slices(traced, board)  # type: ignore[arg-type]
    assert found == pytest.approx(min(board.l2_slices, lines**board.sum_slices))
