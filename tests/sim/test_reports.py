"""What a report says: where in the user's program, the cause once, and an honest last line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mutations import flipped_parity
from ptx_kernel import module

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.sim import Finding, Hazards, SimError, simulate
from cutex.sim.ptx.parse import parse
from cutex.sim.reports import around, excerpts, folded


def test_inline_assembly_stands_at_the_line_that_holds_it(root=Path(__file__).parents[2]):
    compiled = compile(stage("sm_90a", 3).kernel(), "bf16", "sm_90a")
    (program,) = parse(compiled.ptx).values()
    waits = [i for i in program.code if i.op.startswith("mbarrier.try_wait")]
    assert waits
    for wait in waits:
        file, line, column = wait.source
        source = Path(file).read_text().splitlines()[line - 1]
        assert "mbarrier_wait(" in source
        assert source[column - 1 :].startswith("cute.arch.mbarrier_wait") or column


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
    assert re.search(
        r"last waited with parity \d at PTX line \d+: mbarrier.try_wait.*py:\d+", first
    )
    assert "cute.arch.mbarrier_wait(self[slot], phase)\n      ^" in text
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


def test_a_caret_stands_under_the_column(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("def kernel():\n    x = load(a)\n")
    assert excerpts(f"at PTX line 1: ld ({file}:2:9)") == (
        f"\n    {file}:2\n      x = load(a)\n          ^"
    )
    assert excerpts(f"({file}:2) ({file}:77) (nowhere.py:1)").endswith("x = load(a)\n      ^")


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
def test_the_last_line_and_the_exit_code_agree_with_what_was_found(kind, tmp_path, root):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("FAULT", FAULTS[kind]))
    told = tmp_path / "told.json"
    ran = subprocess.run(
        [sys.executable, "-m", "cutex.sim", "--arch", "sm_90a", "--ptx", "--json", told, script],
        cwd=root,
        capture_output=True,
        text=True,
    )
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
        assert found["findings"][0]["sources"][0]["text"] == FAULTS[kind]


@pytest.fixture
def root() -> Path:
    return Path(__file__).parents[2]


def test_what_was_found_before_an_error_is_told_with_it():
    compiled = compile(stage("sm_90a", 2).kernel(), "bf16", "sm_90a")
    with pytest.raises(SimError) as raised:
        simulate(flipped_parity(compiled, 2), *matrices())
    text = str(raised.value)
    assert text.startswith("deadlock:")
    assert text.count("found before that:") == 1
    assert text.count("\nrace:") == 1
