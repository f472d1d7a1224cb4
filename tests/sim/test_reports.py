"""Reports: the place in the user's program, each cause once, and a correct last line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from mutations import flipped_parity
from ptx_kernel import module

from cutex import debug_info
from cutex.compile import compile
from cutex.debug_info import Call
from cutex.kernels.gemm import stage
from cutex.sim import Finding, Hazards, SimError, SimReport, simulate
from cutex.sim.ptx.parse import parse
from cutex.sim.ptx.program import Source
from cutex.sim.reports import around, folded
from cutex.sim.sides import Side, SmemNames


def test_inline_assembly_stands_at_the_line_that_holds_it(root=Path(__file__).parents[2]):
    compiled = compile(stage("sm_90a", 3).kernel(), "bf16", "sm_90a")
    (program,) = parse(compiled.ptx).values()
    waits = [i for i in program.code if i.op.startswith("mbarrier.try_wait")]
    assert waits
    for wait in waits:
        source = Path(wait.source.file).read_text().splitlines()[wait.source.line - 1]
        assert source[wait.source.column - 1 :].startswith("cute.arch.mbarrier_wait")


def test_a_line_that_is_reached_twice_has_two_call_stacks():
    compiled = compile(stage("sm_90a", 3).kernel(), "bf16", "sm_90a")
    (program,) = parse(compiled.ptx).values()
    waits = [i.source for i in program.code if i.op.startswith("mbarrier.try_wait")]
    assert len({(s.file, s.line) for s in waits}) == 1
    callers = {tuple(call.function for call in s.stack) for s in waits}
    assert ("Barrier.wait", "Ring.wait_full", "Stage3.mma", "Stage3.kernel") in callers
    assert ("Barrier.wait", "Ring.acquire", "Stage3.load", "Stage3.kernel") in callers
    for stack in (s.stack for s in waits):
        assert stack[-1].file.endswith("kernels/gemm/sm90/stage3.py")
        for call in stack[1:]:
            source = Path(call.file).read_text().splitlines()[call.line - 1]
            inner = stack[stack.index(call) - 1].function.rpartition(".")[2]
            assert f"{inner}(" in source[call.column - 1 :]


@pytest.mark.parametrize("key", [("sm_90a", 3), ("sm_100a", 5)], ids=str)
def test_the_parts_of_shared_memory_have_the_names_of_the_kernel(key):
    compiled = compile(stage(*key).kernel(), "bf16", key[0])
    (program,) = parse(compiled.ptx).values()
    (smem,) = compiled.dynamic_smem.values()
    names = SmemNames.of(program, 1024, smem)
    assert [b.name for b in program.buffers[:2]] == ["sA", "sB"]
    b, full = program.buffers[1], next(b for b in program.buffers if b.name == "ab.full")
    assert names.at(1024 + full.offset + 16) == "ab.full[2]"
    addresses = f"0x{1024 + b.offset:x}..0x{1024 + b.offset + 64:x}"
    assert names.with_names(f"reads shared memory {addresses}") == (
        f"reads shared memory sB[0..31] (0x{1024 + b.offset:x}..0x{1024 + b.offset + 64:x})"
    )
    assert SmemNames.of(program, 1024, smem + 16).buffers == [], "not certain"


def matrices():
    return [torch.zeros(256, 256, dtype=torch.bfloat16) for _ in range(3)]


def test_a_wrong_parity_is_one_report_with_the_wait_and_its_source():
    compiled = compile(stage("sm_90a", 3).kernel(), "bf16", "sm_90a")
    with pytest.raises(Hazards) as raised:
        simulate(flipped_parity(compiled, 1), *matrices())
    reports = folded(raised.value.findings)
    assert len(raised.value.findings) > 3
    assert len(reports) == 1
    text = str(raised.value)
    first = text.split("\n")[1]
    assert re.match(
        r"\S+mma.py:\d+:\d+, called at cutex/kernels/\S+stage3.py:\d+:\d+: race: ", first
    )
    assert re.search(
        r"last waited with parity \d at PTX line \d+ \(cutex/device/pipeline.py:\d+:\d+, called "
        r"at cutex/kernels/gemm/sm90/stage3.py:\d+:\d+\)",
        first,
    )
    assert "the TMA load of mB[0, 0] (bf16 tensor 256x256" in first
    assert "shared memory sB[0.." in first and "mbarrier ab.full[0] (" in first
    assert "cute.arch.mbarrier_wait(self[slot], phase)\n      ^" in text
    assert "in Ring.wait_full\n      self.full.wait(state.phase, state.slot)\n" in text
    assert "what would order the two: a wait, by this warp or one that it waits for" in text
    assert f"{len(raised.value.findings) - 1} more follow from the same wait" in text


def wait(line: int) -> str:
    return f"on which this warp last waited with parity 1 at PTX line {line}: mbarrier.try_wait"


def test_findings_of_one_wait_are_folded_and_others_are_not():
    found = [
        Finding("tx-count", "bytes were announced that never came", "PTX line 1: x"),
        Finding("race", f"a; {wait(9)}", "PTX line 2: x"),
        Finding("race", f"b; {wait(9)}", "PTX line 3: x"),
        Finding("race", f"c; {wait(8)}", "PTX line 4: x"),
        Finding("exit", "a CTA returns", "PTX line 5: x"),
    ]
    reports = folded(found)
    assert [(r.root.where[9], len(r.followers)) for r in reports] == [("2", 2), ("1", 0), ("4", 0)]
    assert reports[0].as_dict()["followers"][0]["ptx_line"] == 3


def test_a_caret_stands_under_the_column_of_each_call(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("def kernel():\n    x = load(a)\n")
    stack = (
        Call(str(file), 2, 9, "load"),
        Call(str(file), 2, 0, "kernel"),
        Call("no.py", 7, 1, ""),
    )
    assert list(Side(1, "ld", stack, "").lines()) == [
        f"    {file}:2:9 in load",
        "      x = load(a)",
        "          ^",
        f"    called at {file}:2 in kernel",
        "      x = load(a)",
        "      ^",
        "    called at no.py:7:1",
    ]


def test_of_many_that_follow_a_few_are_listed():
    side = Side(5, "st.shared.b32 [%r1], %r2", (Call("k.py", 3, 1, "kernel"),), "k.py:3:1")
    many = [Finding("race", f"PTX line {i}: x", "over", sides=(side,)) for i in range(40)]
    (report,) = folded(many)
    text = str(report)
    assert "39 more follow from the same cause:" in text and "    and 35 more" in text
    assert len(report.as_dict()["followers"]) == 39


def test_the_place_is_the_call_from_another_folder_and_our_files_have_short_names():
    here = str(Path(debug_info.__file__).parent)
    atom, ring = (Call(f"{here}/device/{f}.py", 5, 1, f) for f in ("atoms", "pipeline"))
    mine, kernel = Call("/a/mine.py", 7, 3, "load"), Call(f"{here}/k/stage0.py", 9, 1, "kernel")
    stack = (atom, ring, mine, kernel)
    assert Source(*atom[:3], stack).where() == (
        "cutex/device/atoms.py:5:1, called at /a/mine.py:7:3"
    )
    beside = Call("/a/kernel.py", 1, 1, "kernel")
    assert Source(*mine[:3], (mine, beside)).where() == (
        "/a/mine.py:7:3, called at /a/kernel.py:1:1"
    )


def test_what_simulate_returns_can_be_printed():
    told = str(SimReport(launches=1, ctas=4, instructions=9, findings=[Finding("race", "x", "y")]))
    assert told.splitlines()[0] == "race: x"
    assert told.splitlines()[-1] == (
        "1 launch of 4 CTAs, 9 warp-instructions, 0.0 s, 1 finding, no advisories"
    )


def test_ptx_is_shown_around_each_line():
    text = module("mov.u32 %r0, 1;", {}, __import__("ptx_kernel").Shape(), "sm_90a", "")
    shown = around(text, "race at PTX line 4, which PTX line 1 wrote")
    assert ">     1 .version" in shown and ">     4" in shown


SCRIPT = """
import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(a: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    FAULT

@cute.jit
def launch(a: cute.Tensor):
    kernel(a).launch(grid=(2, 1, 1), block=(64, 1, 1))

x = torch.ones(64, device="cuda")
try:
    launch(from_dlpack(x))
except Exception as error:
    print("caught", type(error).__name__)
"""
FAULTS = {
    "BadAddress": "a[t + 1000] = a[t]",
    "Deadlock": "cute.arch.barrier(barrier_id=3, number_of_threads=96)",
    "": "a[0] = cutlass.Float32(cute.arch.block_idx()[0])",  # a race: a finding, and no error
    "none": "a[t] = a[t]",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_last_line_and_the_exit_code_agree_with_what_was_found(kind, tmp_path, run_script):
    told = tmp_path / "told.json"
    how = ("--arch", "sm_90a", "--ptx", "--json", str(told))
    ran = run_script(SCRIPT.replace("FAULT", FAULTS[kind]), *how)
    last = ran.stderr.splitlines()[-1]
    found = json.loads(told.read_text())
    assert last.startswith("cutex: 1 launch of 1 kernel"), ran.stderr
    if kind == "none":
        assert ran.returncode == 0 and last.endswith("no findings")
        assert not found["errors"] and not found["findings"]
        return
    assert ran.returncode == 1
    assert FAULTS[kind] in ran.stderr, "the line at fault is shown"
    assert "PTX around line" in ran.stderr
    if kind:
        assert last.endswith(f"ended by {kind}")
        assert f"caught {kind}" in ran.stdout
        assert [e["type"] for e in found["errors"]] == [kind]
    else:
        assert "1 finding" in last
        assert found["findings"][0]["sides"][0]["stack"][0]["text"] == FAULTS[kind]


def test_what_was_found_before_an_error_is_told_with_it():
    compiled = compile(stage("sm_90a", 2).kernel(), "bf16", "sm_90a")
    with pytest.raises(SimError) as raised:
        simulate(flipped_parity(compiled, 2), *matrices())
    text = str(raised.value)
    first = text.partition("\n")[0]
    assert ": race: " in first and "on which this warp last waited with parity" in first
    assert first.endswith("; the run ends by deadlock")
    assert text.count("\nthe end of the run:\n") == 1
    assert ": deadlock: no warp can run" in text.partition("\nthe end of the run:\n")[2]
    assert text.count(": race: ") == 1


def test_the_place_of_an_operation_is_never_in_a_stand_in():
    """A script's calls pass through the simulator's stand-ins; where the DSL alone stands between
    one and the operation, the DSL would name the stand-in."""
    from cutlass._mlir_helpers import op

    within = {"__name__": "cutex.sim.host.dsl_stand_in", "op": op, "sys": sys}
    exec("def find(): return op._find_user_frame(sys._getframe())", within)
    assert within["find"]().f_code.co_name == "find"
    with debug_info.recording():
        found = within["find"]()
    assert found.f_code is sys._getframe().f_code
    assert within["find"]().f_code.co_name == "find"
