"""Kernels that use what a script's empty tensors hold, each beside a twin that is right."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from ptx_kernel import Shape, module

from cutex.arch import arch
from cutex.sim.host.capture import HostTensor
from cutex.sim.host.torch_stand_in import torch_on_cpu
from cutex.sim.machine.memory import BLANK32
from cutex.sim.ptx.parse import parse
from cutex.sim.simulation import Simulation

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_does_not_use_what_an_empty_tensor_holds(kind, run_script):
    body, right, told = KINDS[kind]
    text = SCRIPT.replace("BODY", body).replace("RIGHT", right)
    done = run_script(text.replace("MADE", ZEROS))
    assert done.returncode == 0 and "right" in done.stdout, done.stderr
    done = run_script(text.replace("MADE", EMPTY).replace("assert", "# "))
    assert told in done.stderr and (done.returncode == 0) == (not told), done.stderr


BULK = """.reg .b32 at; mov.u32 at, smem; shl.b32 %r1, %i, 2; add.u32 %r1, %r1, at;
    st.shared.u32 [%r1], 1; fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p0, %i, 0;
    @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%work], [at], 128;
    @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"""
LOAD = "ld.global.u32 %r1, [%work_i];"


@pytest.mark.parametrize("body, told", [
    ("red.global.add.u32 [%work_i], 1;", "lane 0 changes by an atomic work[0] (64 uint32)"),
    ("red.global.add.u32 [%work_i+128], 1;", ""),
    (f"{LOAD} add.u32 %r1, %r1, 1; st.global.u32 [%work_i], %r1;", ""),
    (f"{LOAD} and.b32 %r1, %r1, 4; cvt.u64.u32 %d1, %r1; add.u64 %d1, %d1, %work;"
     "st.global.u32 [%d1+128], 1;", "at an address that comes from work[0] (64 uint32)"),
    (f"st.global.u32 [%work_i], 4; {LOAD} cvt.u64.u32 %d1, %r1; add.u64 %d1, %d1, %work;"
     "st.global.u32 [%d1+128], 1;", ""),
    (BULK, "warp 0 adds in bulk to work[0] (64 uint32)"),
])  # fmt: skip
def test_what_nothing_has_written_is_not_counted_in_nor_an_address(body, told):
    """The first 32 words are empty."""
    raw = np.zeros(64 + 32, np.uint32)
    start = -raw.ctypes.data % 128 // 4
    work = raw[start : start + 64]
    work[:32] = BLANK32
    tensor = HostTensor.of(work, "work")
    assert tensor is not None
    run = Simulation(
        parse(module(body, {"work": work}, Shape(smem=128), "sm_90a", "")),
        [replace(tensor, blank=True)],
    )
    value = ctypes.c_uint64(tensor.address)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    run.launch(Shape(smem=128).launch("snippet", params))
    found = [str(f) for f in run.report.findings]
    assert len(found) == bool(told) and all(told in text for text in found), found


def test_only_empty_tensors_of_the_gpu_are_filled():
    with torch_on_cpu(arch("sm_90a")) as memory:
        made = [torch.empty(3, 7, device="cuda"), torch.zeros(64, device="cuda")]
        made += [made[0].new_empty(5), torch.empty_like(made[1], dtype=torch.bfloat16)]
        here = torch.zeros(4).new_empty(4)
        gone = torch.zeros(4, device="cuda")
        old = memory._held[gone.untyped_storage().data_ptr()]
        memory._held[here.data_ptr()] = old._replace(address=here.data_ptr())
        del gone  # whose address another tensor has now
        assert not memory.blank(here.zero_()).any()
        blank = {r.address: r.blank for r in memory.regions([])}
        assert [blank[t.data_ptr()] for t in made] == [True, False, True, True]
        assert here.data_ptr() not in blank
        assert all(bool(t.isnan().all()) for t in (made[0], *made[2:]))
