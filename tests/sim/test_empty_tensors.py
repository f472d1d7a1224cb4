"""Kernels that use what a script's empty tensors hold, each beside a twin that is right."""

from __future__ import annotations

import pytest

SCRIPT = """
import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(mX: cute.Tensor, mWork: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    BODY

@cute.jit
def launch(mX: cute.Tensor, mWork: cute.Tensor):
    kernel(mX, mWork).launch(grid=(2, 1, 1), block=(32, 1, 1))

x = torch.arange(64, device="cuda", dtype=torch.int32)
work = torch.MADE
launch(from_dlpack(x), from_dlpack(work))
assert RIGHT, (x, work)
print("right")
"""
EMPTY, ZEROS = "empty(64, device='cuda', dtype=torch.int32)", "zeros_like(x)"
KINDS = {  # the body; what holds behind it; what is told of the empty tensor
    "a counter": (
        "cute.arch.atomic_add(mWork.iterator, cutlass.Int32(1))",
        "work[0] == 64",
        "CTA (0,0,0) warp 0 lane 0 changes by an atomic mWork[0] (64 int32), which nothing has",
    ),
    "an index": (
        "mX[mWork[32 * block + t] + t] = t",
        "(x[:32] == torch.arange(32).cuda()).all()",
        "accesses memory at an address that comes from mWork[0] (64 int32), which nothing has",
    ),
    "a copy": ("mX[32 * block + t] = mWork[32 * block + t]", "True", ""),
}


@pytest.mark.parametrize(
    "kind",
    ["a counter", *(pytest.param(k, marks=pytest.mark.slow) for k in ("an index", "a copy"))],
)
def test_what_an_empty_tensor_holds_is_not_used(kind, run_script):
    body, right, told = KINDS[kind]
    text = SCRIPT.replace("BODY", body).replace("RIGHT", right)
    done = run_script(text.replace("MADE", ZEROS))
    assert done.returncode == 0 and "right" in done.stdout, done.stderr
    done = run_script(text.replace("MADE", EMPTY).replace("assert", "# "))
    assert told in done.stderr and (done.returncode == 0) == (not told), done.stderr
