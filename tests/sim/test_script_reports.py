"""What python -m cutex.sim prints of a script: the cause first, what only follows from it last."""

from __future__ import annotations

import pytest

SCRIPT = """
import sys
import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

@cute.kernel
def kernel(a: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    s = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(64))
    s[t] = a[t]
    a[t] = s[63 - t]
    ADVISED

@cute.jit
def launch(a: cute.Tensor):
    kernel(a).launch(grid=(1, 1, 1), block=(64, 1, 1))

x = torch.arange(64, device="cuda", dtype=torch.float32)
launch(from_dlpack(x))
END
"""
ENDS = {
    "assert torch.equal(x.cpu(), torch.zeros(64))": "AssertionError",
    "sys.exit('wrong result')": "wrong result",
    "raise ValueError('no')": "ValueError: no",
}


@pytest.mark.parametrize("end", ENDS)
def test_findings_come_before_the_script_s_own_end(end, run_script):
    ran = run_script(SCRIPT.replace("END", end).replace("ADVISED", ""), "--arch", "sm_90a")
    assert ran.returncode == 1
    race, own = ran.stderr.index(": race: "), ran.stderr.index(ENDS[end])
    assert race < own
    assert ran.stderr.splitlines()[-1].startswith("cutex: 1 launch of 1 kernel")


def test_what_ends_a_run_comes_first_and_advisories_last(run_script):
    text = SCRIPT.replace("ADVISED", "a[t + 4096] = a[t]").replace("END", "")
    ran = run_script(text, "--arch", "sm_90a")
    first, last = ran.stderr.splitlines()[0], ran.stderr.splitlines()[-1]
    assert ": bad address: " in first
    assert ran.stderr.count(": race: ") == 1  # told with the end, and not again
    assert last.endswith("ended by BadAddress") and "no finding" not in last


def test_advisories_come_behind_findings(run_script):
    """A CTA's 64 threads: lanes of one warp exchange values without a sync, warps race."""
    text = SCRIPT.replace("s[63 - t]", "s[t ^ 1] + s[63 - t]").replace("ADVISED", "")
    ran = run_script(text.replace("END", ""), "--arch", "sm_90a")
    kinds = [
        line.partition("cutex: ")[2] for line in ran.stderr.splitlines() if line[:7] == "cutex: "
    ]
    advised = [i for i, line in enumerate(kinds) if ": advisory, " in line]
    found = [i for i, line in enumerate(kinds) if ": race: " in line and i not in advised]
    assert advised and found and max(found) < min(advised)
