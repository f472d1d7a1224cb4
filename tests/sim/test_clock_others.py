"""The clock against published measurements; its fits; the costs of instructions in order."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cutex.clock_errors import b200 as clock_b200
from cutex.clock_errors import backward, foreign, predictions, published, record_backward
from cutex.clock_errors.fit import descend
from cutex.clock_errors.page import MEASURED, main
from cutex.clock_errors.predictions import PREDICTED, predicted, predicted_ops
from cutex.clock_errors.rows import Summary, board
from cutex.errors import BadOption
from cutex.sim.ptx.operands import Reg
from cutex.sim.ptx.program import Instruction
from cutex.sim.timing import lengths, stored
from cutex.sim.timing.events import Load, Record, Work
from cutex.sim.timing.gpus import gpu
from cutex.sim.timing.machine_code import ALU, FMA, MUFU, PIPES, Sass, costs
from cutex.sim.timing.order import FIELDS, by_instruction
from cutex.sim.timing.regions import regions
from cutex.sim.timing.replay import Run
from cutex.sim.timing.trace import TOGETHER, _paths
from cutex.sim.timing.traffic import loaded

FOREIGN = {  # rows; median, nine of ten and largest error that may be
    "cutlass": (15, 0.02, 0.05, 0.10),
    "quack": (25, 0.01, 0.04, 0.15),
    "fa4": (24, 0.05, 0.10, 0.12),
}
LONG = ("quack",)  # of which CI reckons two problems


@pytest.mark.slow
@pytest.mark.parametrize(
    "library, quick",
    [
        *((name, name in LONG) for name in FOREIGN),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in LONG),
    ],
)
def test_errors_of_others_kernels_on_hopper_do_not_grow(library, quick):
    count, *most = FOREIGN[library]
    rows = [r for r in foreign.measured(MEASURED) if r.library == library]
    assert len(rows) == count
    if quick:
        rows = [r for r in rows if r.problem in ("2048x2048x2048", "4096x4096x4096")]
    found = list(foreign.errors(rows, foreign.traces([library]), board()))
    assert len(found) == len(rows) >= 10
    errors = Summary.of(e.cycles for e in found)
    for told, limit in zip((errors.median, errors.ninth, errors.largest), most, strict=True):
        assert told <= limit + 0.01 * quick, errors  # a part of the rows


def test_each_byte_comes_from_memory_once_whoever_loads_it_first():
    """Where each CTA has one tile, causal ones begin at keys of their own, others all at the same:
    then all of K is wanted at once, or an eighth of it."""
    traced = foreign.traces(["fa4"])
    for size, first in (("1,1024,16,128", 1 / 8), ("1,1024,16,128 causal", 1.0)):
        one = traced[f"fa4/{size}"]
        loads, _, _ = lengths._moved(
            one, list(zip((one.short, one.long), one.tile_flops, strict=True))
        )
        found = lengths.touches(one, loads)
        assert len(found) == 3  # Q, K, V
        walking = [tmap for tmap, x in found.items() if x.size < loaded(one.record)[tmap]]
        assert [found[tmap].first for tmap in walking] == [first] * 2
        for tmap, x in found.items():
            at_first = x.size * len(one.tiles)
            come = at_first * x.first + (loads[tmap] - at_first) * x.later
            assert come == pytest.approx(one.long.sharing[tmap].footprint)
            assert x.miss(0.0) == x.first and x.miss(x.size) == x.later


EVERY = 9  # of the held out rows of a B200; `python -m cutex.clock --b200` does them all
B200_LARGEST = {"fp16": (0.055, 0.14), "fp8": (0.06, 0.15), "nvfp4": (0.07, 0.20)}  # median, ninth


@cache
def b200() -> clock_b200.B200Model:
    return clock_b200.B200Model(stored.load(clock_b200.TRACES))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", B200_LARGEST)
def test_errors_against_a_b200_do_not_grow(dtype):
    rows = [r for r in clock_b200.measured() if r.dtype == dtype and r.held_out][::EVERY]
    assert len(rows) >= 15
    errors = Summary.of(e.relative for e in clock_b200.errors(rows, b200()))
    assert errors.count == len(rows)
    assert errors.median <= B200_LARGEST[dtype][0], errors
    assert errors.ninth <= B200_LARGEST[dtype][1], errors


def test_a_cache_of_random_lines_keeps_what_fits_and_part_of_what_does_not():
    assert clock_b200.refetched(0.9) == 0.0
    part = clock_b200.refetched(2.0)
    assert part == pytest.approx(1 - np.exp(-2 * part))
    assert clock_b200.refetched(1.2) < part < 1.0


def test_rows_were_run_with_extents_of_16_bytes():
    row = clock_b200.B200Row("nvfp4", (4096, 257, 257), (256, 256), (2, 1), 1.0)
    assert row.padded == (4096, 288, 288)
    assert replace(row, dtype="fp16").padded == (4096, 264, 264)


def test_more_tiles_take_as_long_as_the_last_recorded_ones():
    """Tiles of 10 FLOPs whose MMAs end at 100, 150, 200; the stores of the first two 30 later."""
    mma = [(100.0, 10.0), (150.0, 20.0), (200.0, 30.0)]
    run = Run(230.0, mma, {}, {}, {}, [], 230.0, [0.0], 0.0, [130.0, 180.0])
    assert clock_b200.after_tiles(run, 1, 10.0, 3) == 130.0
    assert clock_b200.after_tiles(run, 5, 10.0, 3) == 200.0 + 2 * 50.0 + 30.0


def test_half_of_the_b200s_problems_are_held_out():
    problems = {r.mnk: r.held_out for r in clock_b200.measured()}
    assert len(problems) == 40
    assert sum(problems.values()) == 22


def test_a_file_that_is_no_table_of_rows_is_refused_in_one_sentence(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,2\n")
    for path, says in ((file, "is no table of dtype, m"), (tmp_path / "none.csv", "No such file")):
        assert main(["--b200", str(path)]) == 2
        told = capsys.readouterr().err
        assert says in told
        assert told.count("\n") == 1


def test_fitting_finds_the_constants_that_rows_were_made_with():
    true = {"a": 3.0, "b": 0.5}
    rows = [(1.0, 2.0), (4.0, 1.0), (2.0, 7.0)]
    wanted = [true["a"] * x + true["b"] * y for x, y in rows]

    def loss(values):
        got = [values["a"] * x + values["b"] * y for x, y in rows]
        return sum(abs(g / w - 1) for g, w in zip(got, wanted, strict=True))

    found = descend({"a": 2.0, "b": 1.0}, loss)
    assert loss(found) < 0.1 < loss({"a": 2.0, "b": 1.0})
    assert found == pytest.approx(true, rel=0.15)


# ---- the cost of a run of instructions


def sass(at: int, opcode: str, line: int, stall: int = 1) -> Sass:
    return Sass(at, opcode, line, stall, (), 0)


def test_a_warp_beside_a_wgmma_waits_for_pipes_that_are_slower():
    code = [sass(16 * i, "FMNMX", 7) for i in range(8)] + [sass(128, "EXIT", 9)]
    alone = costs(code)[7]
    beside = costs(code, {FMA: 2.0, ALU: 2.0, MUFU: 1.33})[7]
    assert alone.cycles == beside.cycles == 15  # two for each, and the last need not wait
    assert beside.beside == 14
    assert alone.beside == 0
    assert alone.pipes[ALU] == 16


def in_block(block: int, goes: int = 0, **opcodes: str) -> list[Sass]:
    """An instruction for each PTX line, as L1, the last a branch where the block goes elsewhere."""
    each = [Sass(0, x, int(line[1:]), 1, (), 0, block) for line, x in opcodes.items()]
    if goes:
        each[-1].goes, each[-1].guarded = goes, True
    return each


def test_of_a_loop_that_is_unrolled_one_copy_is_executed():
    """Four copies in the loop, two and one behind it, and what stands before it: line 3."""
    loop = [*in_block(2, L1="LDG.E", L2="FADD")] * 4 + in_block(2, 2, L3="IADD3", L4="BRA")
    rest = [*in_block(3, L1="LDG.E", L2="FADD")] * 2 + in_block(4, L1="LDG.E", L2="FADD", L3="MOV")
    code = [*in_block(1, L3="MOV"), *loop, *rest]
    slots = {line: cost.slots for line, cost in costs(code).items()}
    assert slots == {1: 1.0, 2: 1.0, 3: 0.25, 4: 0.25}


def test_an_instruction_of_several_blocks_is_executed_in_all_but_its_slow_path():
    """A division: a check, and a call that few take."""
    opcodes = {1: ("MUFU.RCP", "FCHK", "FFMA", "FFMA"), 2: ("CALL.REL", "MOV"), 3: ("BSYNC",)}
    code = [Sass(0, x, 1, 1, (), 0, block) for block, each in opcodes.items() for x in each]
    assert costs(code)[1].slots == 5


def test_code_that_stands_behind_its_place_is_no_loop():
    code = in_block(1, 3, L1="FADD", L2="BRA") + in_block(2, L3="FADD", L4="EXIT")
    code += in_block(3, 2, L5="FADD", L6="BRA")
    assert costs(code)[1].slots == 1.0 and not any(p.depth for p in costs(code)[1].parts)


def ptx(line: int, op: str = "add.f32") -> Instruction:
    return Instruction(op, (), None, False, line, "")


def test_a_stretch_without_events_is_charged_in_the_order_of_its_machine_code():
    """Four lines whose exponential ptxas moved from the last to the second place."""
    code = [sass(0, "FADD", 1), sass(16, "MUFU.EX2", 4), sass(32, "FADD", 2), sass(48, "FADD", 3)]
    program = [ptx(line) for line in (1, 2, 3, 4)]
    charged = by_instruction(program, [False] * 4, costs(code))
    mufu = FIELDS.index(MUFU)
    assert charged[:, mufu].tolist() == [0, 8, 0, 0]
    total = [sum(c.pipes[p] for c in costs(code).values()) for p in PIPES]
    np.testing.assert_allclose(charged[:, 2 : 2 + len(PIPES)].sum(0), total)


def test_what_ptxas_moved_past_a_wait_is_charged_behind_it():
    """The exponential of line 2 comes behind the wait of line 3, the addition of 5 before it."""
    code = [
        sass(0, "FMUL", 1), sass(16, "FADD", 5), sass(32, "WARPGROUP.DEPBAR", 3),
        sass(48, "MUFU.EX2", 2), sass(64, "FMUL", 4),
    ]  # fmt: skip
    program = [ptx(line) for line in (1, 2, 3, 4, 5)]
    charged = by_instruction(program, [False, False, True, False, False], costs(code))
    mufu, fma = FIELDS.index(MUFU), FIELDS.index(FMA)
    assert charged[:2, mufu].sum() == 0
    assert charged[3:, mufu].sum() == 8
    assert charged[:2, fma].sum() == 2
    assert charged[3:, fma].sum() == 1


def test_wgmmas_are_told_by_their_order_where_their_lines_are_others():
    """Two products between two waits have, in the machine code, the lines of their inputs."""
    code = [
        sass(0, "SYNCS.PHASECHK", 1), sass(16, "HGMMA", 5), sass(32, "FADD", 6),
        sass(48, "HGMMA", 2), sass(64, "WARPGROUP.DEPBAR", 4),
    ]  # fmt: skip
    program = [
        ptx(1, "mbarrier.try_wait"), ptx(2, "wgmma.mma"), ptx(5), ptx(3, "wgmma.mma"),
        ptx(4, "wgmma.wait"), ptx(6),
    ]  # fmt: skip
    events = [True, True, False, True, True, False]
    charged = by_instruction(program, events, costs(code))
    assert charged[2, FIELDS.index(FMA)] == 1


def branch(line: int, target: int, guard: bool = True) -> Instruction:
    taken = Reg(1, 0, "%p1") if guard else None
    return Instruction("bra", (), taken, False, line, "", target=target)


def test_regions_are_what_runs_equally_often():
    """1, a loop of 2 and 3 around a branch over 4, and 5 behind it; 3 and 5 follow no branch."""
    program = [ptx(1), ptx(2), branch(3, 4), ptx(4), ptx(5), branch(6, 1), ptx(7)]
    assert regions(program) == [0, 1, 1, 3, 1, 1, 0]


def test_loads_that_follow_one_another_count_as_asked_for_together():
    """Each next box of a tensor is as far from its first as in the recorded CTA."""
    loads = [Load((), 64, (7, 100 - 10 * i, 3), 1) for i in range(TOGETHER + 2)]
    record = Record({0: [Load((), 64, (9, 5), 1), *loads]}, {}, {0: 0}, {0: 2}, 1, 1, 1, True)
    paths = _paths(record)
    assert paths[7, 2] == [(-10 * i, 0) for i in range(TOGETHER)]
    assert paths[9, 2] == [(0,)]


@pytest.mark.parametrize(
    ("case", "within"),
    [
        (0, 0.10),
        pytest.param(1, 0.10, marks=pytest.mark.slow),
        pytest.param(2, 0.15, marks=pytest.mark.slow),
        pytest.param(3, 0.15, marks=pytest.mark.slow),
    ],
)
def test_flash_attention_4s_backward_takes_about_what_was_published(case, within):
    traces, case = stored.load(backward.TRACES), backward.CASES[case]
    found = backward.timed("fa4", case, False, traces, gpu("b200"))
    assert found is not None
    assert found.tflops == pytest.approx(case.full, rel=within)


@pytest.mark.slow
def test_our_backwards_record_is_that_of_the_code():
    """Of head dim 64: the events of each warp, and what its instructions take."""
    case = backward.CASES[2]
    kept = stored.load(backward.TRACES)[backward.key("cutex", case, True, "main 6")].record
    now = record_backward.record(case, True, 6, record_backward.HEADS)[1].record
    assert now.programs.keys() == kept.programs.keys()
    for warp, program in kept.programs.items():
        assert [type(e) for e in program] == [type(e) for e in now.programs[warp]]
        took, takes = (
            [e.slots for e in x if isinstance(e, Work)] for x in (program, now.programs[warp])
        )
        assert takes == pytest.approx(took)


def test_every_published_rate_has_a_record():
    assert {row.record for row in published.ROWS} <= published.traces().keys()
    assert sum(row.fitted for row in published.ROWS) == 2


@pytest.mark.slow
def test_published_rates_of_a_b200_are_predicted_within_its_band():
    board_ = gpu("b200")
    within = (board_.band**2 + board_.clock_band**2) ** 0.5
    found = list(published.errors(published.ROWS, published.traces(), board_))
    assert len(found) == len(published.ROWS)
    assert published.held_out(found).largest < within


@pytest.mark.slow
@pytest.mark.parametrize("op", predicted_ops())
def test_predicted_rows_are_those_of_the_stored_records(op, root):
    kept = [json.loads(line) for line in (root / PREDICTED).read_text().splitlines()]
    assert predicted(op, "sm_100a", False) == [r for r in kept if r["op"] == op]


def test_a_stage_without_a_record_is_named(monkeypatch, tmp_path):
    stored.save({}, tmp_path / "none.json.gz")
    monkeypatch.setattr(predictions, "traces_file", lambda op, arch: tmp_path / "none.json.gz")
    with pytest.raises(BadOption, match=r"gemm/sm_100a/0/.* is not in .*--predict --store"):
        predicted("gemm", "sm_100a", False)


def test_causal_clusters_have_the_blocks_of_queries_that_see_their_keys():
    case = backward.Case(128, 128, 1, 1, 512, 2, 0, 0)
    assert backward.blocks_of(case, True, 128, 1, 1) == (4, 3, 2, 1) * 2
    assert backward.blocks_of(case, True, 256, 1, 2) == (4, 4, 2, 2)
    assert backward.blocks_of(case, False, 256, 2, 1) == (4,) * 8


@pytest.mark.parametrize("module", [backward, published, record_backward])
def test_commands_of_errors_take_no_argument_silently(module, capsys):
    """--help ends before any work, and an unknown option is one sentence."""
    with pytest.raises(SystemExit) as told:
        module.main(["--help"])
    assert told.value.code == 0 and "usage:" in capsys.readouterr().out
    assert module.main(["--no-such-option"]) == 2
    assert capsys.readouterr().err == "cutex: unrecognized arguments: --no-such-option\n"
