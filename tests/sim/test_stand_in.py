"""Scripts written for a GPU run unchanged: python -m cutex.sim script.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutex.sim.host import simulated
from cutex.sim.ptx import parse

ROOT = Path(__file__).parents[2]
HEAD = """
import sys
import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_ptr


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 64 + thread
    if i < cute.size(a):
        c[i] = a[i] + b[i] * scale
    if i == 65:
        cute.printf("a[65] is %.1f\\\\n", a[i])


@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale: cutlass.Float32,
        stream: CUstream):
    grid = [cute.ceil_div(cute.size(a), 64), 1, 1]
    add_kernel(a, b, c, scale).launch(grid=grid, block=[64, 1, 1], stream=stream)


assert torch.cuda.is_available()
torch.manual_seed(0)
a = torch.arange(150.0, device="cuda")
b = torch.randn(150).cuda()
c = torch.empty_like(a)
stream = CUstream(torch.cuda.current_stream().cuda_stream)
"""
CHECK = """
torch.cuda.synchronize()
torch.testing.assert_close(c.cpu(), a.cpu() + 2 * b.cpu())
print("right", *sys.argv[1:], torch.cuda.get_device_capability())
"""


def run(tmp_path: Path, text: str, *options: str, script: tuple[str, ...] = ()):
    path = tmp_path / "script.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cutex.sim", *options, str(path), *script],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


CALLS = {
    "compiled": """
tensors = [from_dlpack(x).mark_layout_dynamic() for x in (a, b, c)]
compiled = cute.compile(add, *tensors, 2.0, stream, no_jit_engine=True)  # of the DSL's
compiled(*tensors, 2.0, stream)
""",
    "in vectors": """
@cute.kernel
def copy_kernel(a: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32,
                               num_bits_per_copy=128)
    cute.copy(atom, *[cute.local_tile(t[thread, None], (4,), (1,)) for t in (a, c)])
@cute.jit
def copy(a: cute.Tensor, c: cute.Tensor):
    copy_kernel(a, c).launch(grid=[1, 1, 1], block=[8, 1, 1])
x, y = torch.randn(8, 16).cuda(), torch.zeros(8, 16, device="cuda")
dynamic = [from_dlpack(t, assumed_align=16).mark_compact_shape_dynamic(1, (0, 1), 4)
           for t in (x, y)]
compiled = cute.compile(copy, *dynamic)
assert "ld.global.v" in compiled.__ptx__  # since rows are known to be multiples of 4
compiled(*dynamic)
assert torch.equal(y[:, 4:8], x[:, 4:8]) and y[:, 8:].abs().sum() == 0
add(from_dlpack(a), from_dlpack(b), from_dlpack(c), 2.0, stream)
""",
    "torch's, of another size than compiled for": """
compiled = cute.compile(add, a, b, c, 2.0, stream)
x, y, z = (torch.randn(70).cuda() for _ in range(3))
compiled(x[1:], y[1:], z[1:], 2.0, stream)
assert torch.equal(z[1:], x[1:] + 2 * y[1:])
add(a, b, c, 2.0, stream)
""",
    "by TVM-FFI": """
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
n = cute.sym_int()
fakes = [make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(3)]
fake_stream = make_fake_stream(use_tvm_ffi_env_stream=True)
compiled = cute.compile(add, *fakes, 2.0, fake_stream, options="--enable-tvm-ffi")
compiled(a, b, c, 2.0)
""",
    "named": """
compiled = cute.compile(add, *[from_dlpack(x) for x in (a, b, c)], 2.0, stream)
compiled(from_dlpack(a), b=from_dlpack(b), c=from_dlpack(c), scale=cutlass.Float32(2.0),
         stream=stream)
""",
    "jitted": "add(from_dlpack(a), from_dlpack(b), from_dlpack(c), 2.0, stream)",
    "benchmarked": """
compiled = cute.compile(add, *[from_dlpack(x) for x in (a, b, c)], 2.0, stream)
took = cute.testing.benchmark(compiled, kernel_arguments=cute.testing.JitArguments(
    from_dlpack(a), from_dlpack(b), from_dlpack(c), 2.0, stream))
assert took > 0  # of the simulation, no GPU
""",
    "as an operator with a backward": """
@torch.library.custom_op("mine::scaled_sum", mutates_args=(), device_types="cuda")
def scaled_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert x.is_cuda and x.device == torch.device("cuda:0") and x.get_device() == 0
    out = torch.empty(x.shape, device=x.device)
    torch.cuda.nvtx.range_push("launch")
    add(x.detach(), y.detach(), out, 2.0, CUstream(torch.cuda.ExternalStream(7).cuda_stream))
    return out
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return scaled_sum(x, y)
    @staticmethod
    def backward(ctx, grad):
        return grad, scaled_sum(torch.zeros_like(grad, device="cuda"), grad)
x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
c.copy_(Sum.apply(x, y).detach())
Sum.apply(x, y).backward(torch.ones(150, device="cuda"))
assert (y.grad == 2).all() and (x.grad == 1).all() and y.grad.is_cuda
assert torch.ones(3).device.type == "cpu" and a.cpu().device.type == "cpu"
import torch._dynamo
""",
    "without what has a default": """
@cute.jit
def add_twice(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: CUstream,
              scale: cutlass.Float32 = 2.0):
    add(a, b, c, scale, stream)
tensors = [from_dlpack(x) for x in (a, b, c)]
compiled = cute.compile(add_twice, *tensors, stream, cutlass.Float32(3.0))
compiled(*tensors, stream)
""",
    "by addresses": """
@cute.jit
def by_addresses(pa: cute.Pointer, pb: cute.Pointer, pc: cute.Pointer, n: cutlass.Int32,
                 stream: CUstream):
    layout = cute.make_layout(n)
    add(cute.make_tensor(pa, layout), cute.make_tensor(pb, layout), cute.make_tensor(pc, layout),
        cutlass.Float32(2.0), stream)
pointers = [make_ptr(cutlass.Float32, x.data_ptr(), cute.AddressSpace.gmem) for x in (a, b, c)]
cute.compile(by_addresses, *pointers, 150, stream)(*pointers, 150, stream)
""",
}  # fmt: skip


QUICK = ("compiled", "torch's, of another size than compiled for", "by TVM-FFI", "jitted")
LAUNCHES = {"in vectors": 2, "torch's, of another size than compiled for": 2,
            "as an operator with a backward": 3}  # fmt: skip


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(CALLS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_script_runs_as_on_a_gpu(tmp_path, names):
    """All ways to compile and call are in one script, since each takes seconds to start."""
    each = [f"c.fill_(float('nan'))\n{CALLS[name]}\n{CHECK}print('done', {name!r})"
            for name in names]  # fmt: skip
    ran = run(tmp_path, HEAD + "\n".join(each), script=("--mine", "3"))
    assert ran.returncode == 0, ran.stderr
    for name in names:
        assert f"done {name}" in ran.stdout
    backward = "as an operator with a backward" in names
    assert ran.stdout.count("a[65] is 65.0") == len(names) + backward
    assert ran.stdout.count("right --mine 3 (10, 0)") == len(names)
    launches = sum(LAUNCHES.get(name, 1) for name in names)
    assert f"cutex: {launches} launches of " in ran.stderr
    assert ran.stderr.rstrip().endswith("no findings")


def test_the_gpu_the_order_and_the_seed_can_be_told(run_script):
    how = ("--arch", "sm_90a", "--order", "random", "--seed", "3")
    ran = run_script(HEAD + CALLS["jitted"] + CHECK, *how)
    assert ran.returncode == 0, ran.stderr
    assert "right (9, 0)" in ran.stdout
    assert "in order random" in ran.stderr


RACE = HEAD.replace("c[i] = a[i] + b[i] * scale", """
        there = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, 64), cute.make_layout(64))
        there[thread] = a[i]
        c[i] = there[(thread + 33) % 64]
""")  # fmt: skip


def test_a_finding_is_told_and_is_exit_code_1(run_script):
    ran = run_script(RACE + CALLS["jitted"])
    assert ran.returncode == 1
    assert "script.py:19:16: race: CTA (0,0,0) warp" in ran.stderr
    assert "no barrier orders the two" in ran.stderr
    assert ran.stderr.rstrip().endswith("1 finding")


def test_ptx_that_the_simulator_does_not_read_is_told_and_is_exit_code_1(run_script, monkeypatch):
    def load(compiled, *_):
        return parse.parse(compiled.__ptx__.replace(".b32", ".b99"))

    monkeypatch.setattr(simulated, "load", load)
    ran = run_script(HEAD + CALLS["compiled"])
    assert ran.returncode == 1
    assert "cannot be read: the declaration: .reg .b99" in ran.stderr


def test_an_access_out_of_bounds_ends_it_with_the_name_of_the_tensor(run_script):
    beyond = HEAD.replace("if i < cute.size(a):", "if True:")
    ran = run_script(beyond + CALLS["jitted"])
    assert ran.returncode == 1
    assert "0 bytes past the end of" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("end", "code"), [("raise SystemExit(3)", 3), ("import sys; sys.exit('no')", 1)]
)
def test_the_script_has_the_last_word(run_script, end, code):
    ran = run_script(end)
    assert ran.returncode == code
    assert ("no\n" in ran.stderr) == ("'no'" in end)


@pytest.mark.slow
def test_what_a_script_raises_is_pythons_to_print(tmp_path):
    ran = run(tmp_path, "assert False")
    assert ran.returncode == 1
    assert "AssertionError" in ran.stderr


WITHOUT_TVM_FFI = """
class Scaled:
    def __init__(self, pointer, n):
        self.pointer, self.n = pointer, n

    def __c_pointers__(self):
        return self.pointer.__c_pointers__()

    def __get_mlir_types__(self):
        return self.pointer.__get_mlir_types__()

    def __extract_mlir_values__(self):
        return self.pointer.__extract_mlir_values__()

    def __new_from_mlir_values__(self, values):
        return Scaled(self.pointer.__new_from_mlir_values__(values), self.n)


@cute.jit
def in_a_tuple(ab: tuple, c: cute.Tensor, scale: cutlass.Float32, stream: CUstream):
    add(ab[0], ab[1], c, scale, stream)


@cute.jit
def of_its_own(sa: Scaled, b: cute.Tensor, c: cute.Tensor, kind: type[cutlass.Numeric],
               scale: cutlass.Constexpr, stream: CUstream):
    assert kind is cutlass.Float32
    add(cute.make_tensor(sa.pointer, cute.make_layout(sa.n)), b, c, kind(scale), stream)


@cute.jit
def no_kernel(a: cute.Tensor):
    print(a.element_type)


ta, tb, tc = (from_dlpack(x) for x in (a, b, c))
assert ta.memspace == cute.AddressSpace.gmem  # as cp.async wants it
assert from_dlpack(a.cpu()).memspace == cute.AddressSpace.generic
mine = Scaled(make_ptr(cutlass.Float32, a.data_ptr(), cute.AddressSpace.gmem), 150)
for _ in range(2):
    cute.compile(in_a_tuple, (ta, tb), tc, 2.0, stream)((ta, tb), tc, 2.0, stream)
in_a_tuple((ta, tb), tc, 2.0, stream)
c.zero_()
of_its_own(mine, tb, tc, cutlass.Float32, 2.0, stream)
cute.compile(no_kernel, ta)(ta)
exported = cute.compile(add, ta, tb, tc, 2.0, stream)
exported(ta, tb, tc, 2.0, stream)
exported.export_to_c(sys.argv[1], "add", function_prefix="add")
"""


def test_what_compiles_without_tvm_ffi_only_runs_too(run_script, tmp_path):
    """Tensors in tuples, objects of the script's own; its exports have the form that it
    requests."""
    done = run_script(HEAD + WITHOUT_TVM_FFI + CHECK, script=(str(tmp_path),))
    assert done.returncode == 0, done.stderr
    assert "5 launches of 1 kernel " in done.stderr and "no findings" in done.stderr
    assert "add_wrapper" in (tmp_path / "add.h").read_text() and (tmp_path / "add.o").exists()


def test_a_tensor_in_a_tuple_has_its_name_in_reports(run_script):
    calls = WITHOUT_TVM_FFI.partition("c.zero_()")[0]
    done = run_script(HEAD.replace("randn(150)", "randn(100)") + calls)
    assert done.returncode == 1
    assert "past the end of ab[1]" in done.stderr and "c[i] = a[i] + b[i] * scale" in done.stderr


BY_TVM_FFI = """
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


@cute.jit
def in_a_tuple(abp: tuple, c: cute.Tensor, scale: cutlass.Float32, stream: CUstream):
    a = cute.make_tensor(abp[1][1], cute.make_layout(150))
    add(a, abp[0], c, scale, stream)


fake = make_fake_tensor(cutlass.Float32, (150,), (1,))
at = make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem)
environment = make_fake_stream(use_tvm_ffi_env_stream=True)
compiled = cute.compile(
    in_a_tuple, (fake, (fake, at)), fake, 2.0, environment, options="--enable-tvm-ffi"
)
compiled((b, (b, a.data_ptr())), c, 2.0)
"""


def test_tvm_ffi_takes_tensors_and_pointers_in_tuples(run_script):
    done = run_script(HEAD + BY_TVM_FFI + CHECK)
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout and "no findings" in done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(("none.py",), "none.py is not a file"), (("--seed", "-1", __file__), "--seed -1: takes"),
     (("--arch", "sm_70", "x.py"), "invalid choice: 'sm_70'"),
     (("--order", "new", "x.py"), "invalid choice: 'new'"), ((), "script")],
)  # fmt: skip
def test_bad_input_is_one_sentence(options, sentence):
    ran = subprocess.run(
        [sys.executable, "-m", "cutex.sim", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert sentence in ran.stderr
    assert "Traceback" not in ran.stderr


BY_HAND = """
import cuda.bindings.runtime as cudart
from cutlass.base_dsl.runtime.cuda import DSLCudaRuntimeError, checkCudaErrors
from cutlass.cute.testing import autotune_jit


@cute.kernel
def fill_kernel(p: cute.Pointer, n: cutlass.Constexpr):
    smem = cute.arch.dynamic_smem_size()
    block, _, _ = cute.arch.block_idx()
    cute.make_tensor(p, cute.make_layout(n))[block] = smem


@cute.jit
def fill(p: cute.Pointer, n: cutlass.Constexpr):
    fill_kernel(p, n).launch(grid=(n, 1, 1), block=(1024, 1, 1), smem=512, cooperative=True)


def pointer(address):
    return make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem)


memory = checkCudaErrors(cudart.cudaMalloc(16))
checkCudaErrors(cudart.cudaMemset(memory, 7, 16))
fill(pointer(memory), 3)
checkCudaErrors(cudart.cudaDeviceSynchronize())
read = torch.empty(4, dtype=torch.int32)
to_host = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
checkCudaErrors(cudart.cudaMemcpy(read.data_ptr(), memory, 16, to_host))
assert read.tolist() == [512, 512, 512, 0x07070707], read
checkCudaErrors(cudart.cudaFree(memory))
cutlass.cuda.stream_sync(cutlass.cuda.default_stream())
try:
    fill(pointer(torch.empty(4096, dtype=torch.int32, device="cuda").data_ptr()), 4096)
except DSLCudaRuntimeError as error:
    assert error.error_code == cudart.cudaError_t.cudaErrorCooperativeLaunchTooLarge


@autotune_jit(params_dict={"scale": [2.0, 3.0]}, update_on_change=["a"], warmup_iterations=1)
@cute.jit
def tuned(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: CUstream,
          scale: cutlass.Constexpr = 4.0):
    add(a, b, c, cutlass.Float32(scale), stream)


tuned(*[from_dlpack(x) for x in (a, b, c)], stream)
"""


def test_memory_of_the_runtime_cooperative_launches_and_the_tuner_of_the_dsl(run_script):
    """Memory by cudaMalloc, dynamic smem, a cooperative grid that is refused, and one config."""
    done = run_script(HEAD + BY_HAND + CHECK)
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout and "no findings" in done.stderr


def test_what_the_script_has_on_the_gpu_is_what_lives():
    import torch

    from cutex.arch import arch
    from cutex.sim.host.torch_stand_in import ALIGNMENT, torch_on_cpu

    before = torch.cuda.is_available
    with torch_on_cpu(arch("sm_100a")) as memory:
        kept = torch.zeros(3, 5, device="cuda:0").T
        view = torch.arange(64.0).cuda()[8:]
        torch.ones(1000, device=torch.device("cuda"))  # gone at once
        host = torch.zeros(4)
        same = host.to("cuda")
        same += 1
        assert host.sum() == 0 and same.is_cuda
        assert kept.data_ptr() % ALIGNMENT == 0 and view.data_ptr() % ALIGNMENT == 32
        places = {r.address: r.shape[0] for r in memory.regions([])}
        assert sorted(places.values()) == [4 * 4, 15 * 4, 64 * 4]  # and nothing beside them
        assert any(at <= view.data_ptr() < at + size for at, size in places.items())
        both = torch.cat([kept.flatten(), view])
        assert both.is_cuda and both.data_ptr() % ALIGNMENT == 0
        assert not both.cpu().is_cuda and not torch.zeros(4).is_cuda
        largest = kept.max(dim=0)  # several tensors, by name
        assert largest.values.is_cuda and largest.indices.is_cuda and not host.max(0).values.is_cuda
        assert all(x.is_cuda for x in (*view.topk(2), *view.unique(return_counts=True)))
        first, _ = view.split(28)
        first += 1
        assert first.is_cuda and view[0] == 9, "a view of what is there stays one"
    assert torch.cuda.is_available is before
    assert not kept.is_cuda


# ---- cutex's own functions

OWN = """
import sys
import torch
import cutex

torch.manual_seed(0)
a, b = (torch.randn(200, 136, device="cuda").bfloat16() for _ in range(2))
out = cutex.matmul(a, b.mT)
assert out.is_cuda and type(out) is torch.Tensor
torch.testing.assert_close(out.float(), a.float() @ b.float().mT, rtol=2**-7, atol=1e-2)

q, k, v = (torch.randn(2, 100, 2, 64, device="cuda").half() for _ in range(3))
ends = torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda")


def expected():
    heads = (x.transpose(1, 2).float() for x in (q, k, v))
    found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    return found.transpose(1, 2)


packed = [x.flatten(0, 1) for x in (q, k, v)]
o, lse = cutex.flash_attn_varlen_func(*packed, ends, ends, 100, 100, causal=True, return_lse=True)
assert o.is_cuda and lse.shape == (2, 200)
torch.testing.assert_close(o.float().view(q.shape), expected(), rtol=2**-9, atol=2e-3)

cutex.flash_attn_func(q, k, v, causal=True)  # compiles, before the graph
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    o = cutex.flash_attn_func(q, k, v, causal=True)
q.mul_(2)
graph.replay()
torch.testing.assert_close(o.float(), expected(), rtol=2**-9, atol=4e-3)
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_cutexs_own_functions_run_in_a_script_and_are_counted(tmp_path, arch):
    found = tmp_path / "found.json"
    done = run(tmp_path, OWN, "--arch", arch, "--order", "random", "--json", str(found))
    assert done.returncode == 0 and "right" in done.stdout, done.stderr
    launches = json.loads(found.read_text())["launches"]
    kernels = {name: n for name, n in launches.items() if "attention" in name}
    assert len(launches) == len(kernels) + 1 and sum(kernels.values()) >= 3
    assert "no findings" in done.stderr


@pytest.mark.slow
def test_their_time_is_predicted(tmp_path):
    done = run(tmp_path, OWN[: OWN.index("q, k, v")], "--arch", "sm_90a", "--time")
    assert done.returncode == 0, done.stderr
    assert "on H200: predicted, not measured" in done.stderr and "1 launch of" in done.stderr
