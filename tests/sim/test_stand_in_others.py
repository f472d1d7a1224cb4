"""What scripts of others bring: profilers, tensors that only lend their memory, other archs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cutlass import cute

from cutex.arch import KNOWN
from cutex.sim import simulate
from cutex.sim.timing.gpus import gpu, of_arch

KERNEL = """
import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(a: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    a[t] = a[t] + 1

@cute.jit
def launch(a: cute.Tensor):
    kernel(a).launch(grid=(1, 1, 1), block=(64, 1, 1))

x = torch.ones(64, device="cuda")
compiled = cute.compile(launch, from_dlpack(x), options="--enable-tvm-ffi")
"""
PROFILED = """
from torch.profiler import ProfilerActivity, profile, record_function, schedule
both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
with profile(activities=both, record_shapes=True) as prof, record_function("mine"):
    compiled(x)
    torch.cuda.synchronize()
assert any(e.key == "mine" for e in prof.key_averages())
assert sum(e.device_time_total for e in prof.key_averages()) == 0
assert "mine" in prof.key_averages().table(sort_by="cuda_time_total", row_limit=5)
cycles = []
with profile(activities=[ProfilerActivity.CUDA], schedule=schedule(wait=1, warmup=1, active=2),
             on_trace_ready=lambda p: cycles.append(len(p.events()))) as prof:
    for _ in range(4):
        with record_function("step"):
            compiled(x)
        prof.step()
assert cycles and cycles[0] > 0
with torch.autograd.profiler.profile(use_cuda=True):
    compiled(x)
with torch.autograd.profiler.emit_nvtx():
    compiled(x)
torch.cuda.profiler.start(); torch.cuda.nvtx.range_push("x"); torch.cuda.nvtx.range_pop()
assert x[0].item() == 1 + 7, x[0].item()
print("right")
"""
LENT = """
class Lends:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **how):
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

compiled(Lends(x))
launch(from_dlpack(Lends(x)))
launch(Lends(x))
cute.compile(launch, Lends(x))(Lends(x))
assert (x == 1 + 4).all(), x
print("right")
"""


@pytest.mark.parametrize("text", [PROFILED, LENT], ids=["profilers", "lent memory"])
def test_a_script_runs_as_it_is(text, run_script):
    ran = run_script(KERNEL + text, "--arch", "sm_90a")
    assert ran.returncode == 0 and "right" in ran.stdout, ran.stderr


@cute.kernel
def adds_one(a: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    a[t] = a[t] + 1


@cute.jit
def add_one(a: cute.Tensor):
    adds_one(a).launch(grid=(1, 1, 1), block=(64, 1, 1))


class Lends:
    """An array of a library that torch does not know."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_simulate_takes_what_lends_its_memory():
    array = np.arange(64, dtype=np.float32)
    simulate(add_one, Lends(array), arch="sm_90a")
    np.testing.assert_array_equal(array, np.arange(64) + 1)


MMA = (
    KERNEL.partition("@cute.kernel")[0]
    + """
from cutlass.cute.nvgpu import warp

@cute.kernel
def kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16)))
    own = mma.get_slice(t)
    tA, tB, tC = own.partition_A(a), own.partition_B(b), own.partition_C(c)
    rA, rB, rC = (
        mma.make_fragment_A(tA), mma.make_fragment_B(tB), mma.make_fragment_C(tC)
    )
    cute.autovec_copy(tA, rA)
    cute.autovec_copy(tB, rB)
    rC.fill(0.0)
    cute.gemm(mma, rC, rA, rB, rC)
    cute.autovec_copy(rC, tC)

@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    kernel(a, b, c).launch(grid=(1, 1, 1), block=(32, 1, 1))

a, b = torch.randn(16, 16, device="cuda").half(), torch.randn(8, 16, device="cuda").half()
c = torch.zeros(16, 8, device="cuda")
launch(from_dlpack(a), from_dlpack(b), from_dlpack(c))
assert torch.allclose(c, a.float() @ b.float().t(), atol=1e-2)
print(torch.cuda.get_device_capability(),
      torch.cuda.get_device_properties(0).shared_memory_per_block_optin)
"""
)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("arch", KNOWN)
def test_mma_sync_runs_for_every_arch(arch, run_script):
    ran = run_script(MMA, "--arch", arch)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[0] == f"{KNOWN[arch].capability} {KNOWN[arch].smem_per_cta}"


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
def test_shared_memory_ends_where_that_of_the_arch_ends(arch, run_script):
    text = KERNEL.replace("block=(64, 1, 1)", "block=(64, 1, 1), smem=SMEM").partition("compiled")[
        0
    ]
    for more, code in ((0, 0), (16, 1)):
        smem = KNOWN[arch].smem_per_cta + more
        ran = run_script(text.replace("SMEM", str(smem)) + "launch(from_dlpack(x))", "--arch", arch)
        assert ran.returncode == code, ran.stderr
        assert (f"gives a CTA at most {KNOWN[arch].smem_per_cta}" in ran.stderr) == bool(code)


def test_an_h100_is_a_gpu_of_its_own():
    h100, h200 = gpu("h100"), gpu("h200")
    assert (h100.name, h100.arch, h100.sms) == ("H100", "sm_90a", 132)
    assert h100.hbm_gbs / h200.hbm_gbs == pytest.approx(3.35 / 4.8, rel=0.02)
    assert h100.l2_bytes < h200.l2_bytes
    assert h100.l2_capacity < h200.l2_capacity and h100.band > h200.band
    assert of_arch("sm_90a") == "h200"  # whose times are measured here


@pytest.mark.slow
def test_a_copy_takes_longer_on_an_h100_than_on_an_h200():
    """A kernel that streams 256 MB from memory and back is bound by it."""
    x = torch.ones(1 << 24)
    times = [
        simulate(copies, x, arch="sm_90a", time=True, gpu=name, clusters=2).times[0].us
        for name in ("h200", "h100")
    ]
    assert 1.2 < times[1] / times[0] < 1.5, times


@cute.kernel
def doubles(a: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    mine = cute.zipped_divide(a, (1024,))[None, block]
    own = cute.zipped_divide(mine, (4,))[None, t]
    own.store(own.load() * 2)


@cute.jit
def copies(a: cute.Tensor):
    doubles(a).launch(grid=(16384, 1, 1), block=(256, 1, 1))
