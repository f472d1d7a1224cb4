"""simulate() as users call it: any jitted function, torch or numpy, and the errors for bad
input."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import cutlass
import numpy as np
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_fake_stream
from mutations import mutate
from ptx_kernel import Shape, simulate_ptx

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.problem.gemm import GemmProblem
from cutex.sim import BadAddress, Hazards, NoCompiler, UnknownInstruction, simulate
from cutex.sim.host.capture import HostFunction, HostTensor

THREADS = 64


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, factor, shift: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(x):
        y[i] = x[i] * factor + shift


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Int32, shift: cutlass.Constexpr):
    grid = cute.ceil_div(cute.size(x), THREADS)
    scale_kernel(x, y, factor, shift).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1])


@cute.jit
def scale_on_stream(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Int32, stream):
    grid = cute.ceil_div(cute.size(x), THREADS)
    scale_kernel(x, y, factor, 0).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def scale_twice(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Int32):
    grid = cute.ceil_div(cute.size(x), THREADS)
    scale_kernel(x, y, factor, 0).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1])
    scale_kernel(y, y, factor, 1).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1])


class Scale:
    """A kernel object, as in CUTLASS's examples."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, factor: cutlass.Int32):
        grid = cute.ceil_div(cute.size(x), THREADS)
        scale_kernel(x, y, factor, self.shift).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1])


def numbers(n: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n, dtype=torch.int32), torch.full((n,), -1, dtype=torch.int32)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_jitted_function_with_tensors_a_number_and_a_constant(arch):
    x, y = numbers()
    report = simulate(scale, x, y, 3, 7, arch=arch)
    assert torch.equal(y, x * 3 + 7)
    assert (report.launches, report.ctas, report.findings) == (1, 3, [])
    assert report.instructions == sum(report.counts.values()) > 0 < report.seconds
    assert list(report.counts.values()) == sorted(report.counts.values(), reverse=True)


def test_a_stream_is_taken_and_ignored():
    x, y = numbers()
    simulate(scale_on_stream, x, y, 3, make_fake_stream())
    assert torch.equal(y, x * 3)


def test_two_launches_run_one_after_the_other():
    x, y = numbers()
    assert simulate(scale_twice, x, y, 3).launches == 2
    assert torch.equal(y, (x * 3) * 3 + 1)


def test_a_kernel_object():
    x, y = numbers()
    simulate(Scale(5), x, y, 2)
    assert torch.equal(y, x * 2 + 5)


def test_a_numpy_array_and_what_the_dsl_made_of_a_tensor():
    x, y = np.arange(150, dtype=np.float32), torch.zeros(150)
    simulate(scale, x, from_dlpack(y, assumed_align=16), 2, 0)
    assert (y.numpy() == x * 2).all()


def test_views_with_strides_are_written_in_place():
    whole = torch.zeros(300, dtype=torch.int32)
    x, y = torch.arange(150, dtype=torch.int32), whole[::2]
    simulate(scale, x, y, 2, 1)
    assert torch.equal(whole[::2], x * 2 + 1) and not whole[1::2].any()


def test_an_exported_kernel_serves_sizes_that_it_was_not_compiled_for():
    kernel = compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a")
    for m, n, k in ((64, 64, 64), (200, 136, 72)):
        problem = GemmProblem(m, n, k, init="int")
        a, b = problem.inputs()
        c = problem.output()
        simulate(kernel, a, b, c)
        assert problem.check(a, b, c).ok


# -- refusals --------------------------------------------------------------------------------------


def gemm_arguments(m: int = 64) -> tuple[object, list[torch.Tensor]]:
    problem = GemmProblem(m, 64, 64, init="int")
    kernel = compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a")
    return kernel, [*problem.inputs(), problem.output()]


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text.strip() and "Traceback" not in text
    return text


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda a, b, c: (a.float(), b, c), (TypeError, ValueError)),
        (lambda a, b, c: (a, b, c[:, :-8]), ValueError),
        (lambda a, b, c: (a[0], b, c), (TypeError, ValueError)),
        (lambda a, b, c: (a, b), TypeError),
        (lambda a, b, c: (a, b, "c"), TypeError),
        (lambda a, b, c: (a, b, None), TypeError),
        (lambda a, b, c: (a, b, c, c), TypeError),
    ],
    ids=["dtype", "shape", "rank", "too few", "a string", "None", "too many"],
)
def test_wrong_arguments_are_refused_by_the_kernels_own_host_code(change, kind):
    kernel, arguments = gemm_arguments()
    with pytest.raises(kind) as error:
        simulate(kernel, *change(*arguments))
    one_sentence(error.value)


def test_a_tensor_on_a_gpu_is_named():
    class OnGpu(torch.Tensor):
        device = torch.device("cuda:0")

    kernel, (a, b, c) = gemm_arguments()
    with pytest.raises(TypeError, match=r"lies on cuda:0: the simulator takes CPU tensors"):
        simulate(kernel, a.as_subclass(OnGpu), b, c)


def test_what_is_no_kernel_is_refused():
    with pytest.raises(
        TypeError, match=r"takes a compiled kernel or a @cute\.jit function, got int"
    ):
        simulate(3, *numbers())


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"seed": -1}, ValueError, "seed -1: takes a number from 0"),
        ({"seed": "a"}, TypeError, "seed must be an int, got 'a'"),
        ({"jobs": 1.5}, TypeError, "jobs must be an int, got 1.5"),
        ({"clusters": 2.0}, TypeError, "clusters must be an int, got 2.0"),
        ({"gpu": 3, "time": True}, TypeError, "gpu must be a str, got 3"),
        ({"memory": 3}, TypeError, "memory takes a list of CPU tensors, got int"),
        ({"memory": torch.zeros(2)}, TypeError, "memory takes a list of CPU tensors, got Tensor"),
        ({"max_instructions": 0}, ValueError, "max_instructions 0: takes a number from 1"),
        ({"gpu": "b200"}, ValueError, "gpu 'b200' goes with time=True"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        simulate(scale, *numbers(), 3, 7, **options)


@pytest.mark.parametrize("given", [(), (3, 7, 9)])
def test_another_number_of_arguments_is_one_sentence(given):
    sentence = f"scale cannot be called with {2 + len(given)} arguments: "
    with pytest.raises(TypeError, match=sentence) as error:
        simulate(scale, *numbers(), *given)
    assert "\n" not in str(error.value)


def test_an_unknown_order_is_refused_before_anything_else():
    with pytest.raises(ValueError, match="order 'backwards': takes one of fifo") as error:
        simulate(None, order="backwards")
    one_sentence(error.value)


def test_an_unknown_instruction_names_itself_and_its_line():
    kernel, arguments = gemm_arguments()
    odd = mutate(
        kernel, r"^(\s*)mov\.u32(\s+%r\d+, %tid\.x;)", r"\1mov.u32\2 frob.nicate.b32 %r1, %r2;"
    )
    line = next(i for i, t in enumerate(odd.ptx.split("\n"), 1) if "frob.nicate" in t)
    with pytest.raises(UnknownInstruction) as error:
        simulate(odd, *arguments)
    text = str(error.value)
    assert ": unknown instruction frob.nicate.b32: the simulator does not define it" in text
    assert f"PTX line {line}: frob.nicate.b32 %r1, %r2" in text


def test_a_known_instruction_with_an_unknown_modifier_is_no_guess():
    with pytest.raises(
        UnknownInstruction, match=r"add.odd.u32.*\(modifier .odd\)\n    at PTX line"
    ):
        simulate_ptx("add.odd.u32 %r0, %r1, %r2;", {}, assembles=False)


@pytest.mark.parametrize(
    "shape", [Shape(block=1056), Shape(smem=1 << 20), Shape(grid=3, cluster=2),
              Shape(grid=(1, 65536, 1)), Shape(block=(1, 1, 65))]
)  # fmt: skip
def test_a_launch_that_the_driver_would_refuse(shape):
    with pytest.raises(ValueError, match="launch of snippet: ") as error:
        simulate_ptx("mov.b32 %r0, 1;", {}, shape)
    one_sentence(error.value)


def test_static_shared_memory_counts_too():
    shape = Shape(smem=232448 - 4096)
    simulate_ptx(".shared .align 4 .b8 mine[4096]; mov.b32 %r0, 1;", {}, shape)
    with pytest.raises(ValueError, match="launch of snippet: 232452 bytes of shared memory"):
        simulate_ptx(".shared .align 4 .b8 mine[4100]; mov.b32 %r0, 1;", {}, shape)


def test_without_a_c_compiler_the_sentence_says_what_to_install(monkeypatch, tmp_path):
    _, tensors = gemm_arguments()
    kernel = compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a", cache=False)
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path / "nothing linked yet"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    kernel, tensors = gemm_arguments()
    kernel.__dict__.pop("_cutex_sim", None)
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path / "cache"))  # where it is not linked yet
    with pytest.raises(NoCompiler, match=r"needs a C compiler .* install one") as error:
        simulate(kernel, *tensors)
    one_sentence(error.value)


def test_no_gpu_is_looked_for():
    """Simulating imports neither a CUDA driver nor a module that needs one."""
    code = """
import numpy as np, sys
from cutex.sim import simulate
assert not any(m.startswith(("torch", "cuda.bindings.driver", "cutlass")) for m in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_error_inside_a_launch_comes_out_and_the_kernel_can_be_run_again():
    kernel, (a, b, c) = gemm_arguments()
    with pytest.raises(BadAddress):
        simulate(
            mutate(kernel, r"(st\.global[.\w]*\s+\[%rd\d+)(\+\d+)?\]", r"\g<1>+16777216]"), a, b, c
        )
    simulate(kernel, a, b, c)
    assert GemmProblem(64, 64, 64, init="int").check(a, b, c).ok


# -- poison ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        "mov.b32 %r0, %r77;",
        "ld.shared.b32 %r0, [smem+16];",
        ".local .align 4 .b32 mine; ld.local.b32 %r0, [mine];",
    ],
    ids=["register", "shared memory", "local memory"],
)
def test_what_nothing_has_written_comes_out_as_nan(read):
    out = np.zeros(32, np.float32)
    with pytest.raises(Hazards, match="stores into global memory a value that comes from"):
        simulate_ptx(f"{read} st.global.b32 [%out_i], %r0;", {"out": out}, Shape(smem=64))
    assert np.isnan(out).all()


def test_registers_of_every_width_begin_as_nan():
    halves, double = np.zeros(32, np.uint16), np.zeros(32)
    body = """
    mov.b16 %h0, %h40; st.global.b16 [%halves_i], %h0; add.f64 %d0, %d40, %d40;
    st.global.b64 [%double_i], %d0;
    """
    with pytest.raises(Hazards, match="register %h40, which nothing has written"):
        simulate_ptx(body, {"halves": halves, "double": double})
    assert np.isnan(halves.view(np.float16)).all() and np.isnan(double).all()


def test_poison_that_reaches_the_result_fails_the_check():
    """A product that is computed and never stored."""
    problem = GemmProblem(64, 64, 64, init="int")
    kernel, (a, b, c) = gemm_arguments()
    simulate(mutate(kernel, r"^\s*(@%p\d+ )?st\.global[^;]*;", ""), a, b, c)
    check = problem.check(a, b, c)
    assert not check.ok and "nan" in check.message.lower()


def test_threads_may_call_the_same_kernels_host_code_at_one_time() -> None:
    """Both threads use one library, and each launch reaches the thread that made it."""
    kernel = compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a")
    host = HostFunction(kernel.object_path, kernel.symbol)
    ready = Barrier(2)

    class Together(list):
        def __iter__(self):
            ready.wait(60)  # until the other has said whom to call back, too
            return super().__iter__()

    def launched(m: int) -> list[int]:
        problem, rows = GemmProblem(m, 128, 64), []
        tensors = zip("abc", (*problem.inputs(), problem.output()), strict=True)
        arguments = Together(HostTensor.of(tensor, name) for name, tensor in tensors)
        host(arguments, lambda launch: rows.append(launch.grid[0]))
        return rows

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(launched, (128, 512))) == [[1], [4]]


# -- arguments of a kernel -------------------------------------------------------------------------


@cute.kernel
def pointers_kernel(addresses: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range_constexpr(2):
        there = cute.make_ptr(cutlass.Float32, addresses[i], cute.AddressSpace.gmem)
        out[i, thread] = cute.make_tensor(there, cute.make_layout(32))[thread]


@cute.jit
def by_pointers(addresses: cute.Tensor, out: cute.Tensor):
    pointers_kernel(addresses, out).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_tensors_that_a_kernel_reaches_by_address_are_named_as_memory():
    parts = [torch.randn(32), torch.randn(32)]
    addresses = torch.tensor([p.data_ptr() for p in parts])
    out = torch.zeros(2, 32)
    simulate(by_pointers, addresses, out, memory=parts)
    assert torch.equal(out, torch.stack(parts))
    with pytest.raises(BadAddress, match="loads 0x"):
        simulate(by_pointers, addresses, out, memory=parts[:1])
    with pytest.raises(TypeError, match="memory takes CPU tensors, got int"):
        simulate(by_pointers, addresses, out, memory=[3])


@cute.kernel
def layout_kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    packed = cute.make_tensor(
        cute.recast_ptr(x.iterator, dtype=cutlass.Uint8), cute.make_layout(cute.size(x) // 2)
    )
    out[thread] = packed[thread].to(cutlass.Int32)
    if thread == 0:
        out[32], out[33] = cute.size(x, mode=[0]), cute.size(x, mode=[1])


@cute.jit
def layout_of(x: cute.Tensor, out: cute.Tensor):
    layout_kernel(x, out).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_packed_4_bit_elements_are_single_ones_to_the_kernel():
    codes = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    out = torch.zeros(34, dtype=torch.int32)
    simulate(layout_of, codes.view(torch.float4_e2m1fn_x2), out)
    assert out.tolist() == [*range(32), 4, 16]


def test_packed_elements_lie_side_by_side():
    codes = torch.zeros(4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ValueError, match="needs a dimension that is contiguous"):
        simulate(layout_of, codes.as_strided((2, 2), (8, 2)), torch.zeros(34, dtype=torch.int32))


def without_storage(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("tensor, error, sentence", [
    (torch.conj(torch.complex(torch.ones(4), torch.ones(4))).imag, ValueError, "negated or conj"),
    (torch.conj(torch.ones(4, dtype=torch.complex64)), ValueError, "x is negated or conjugated"),
    (torch.ones(4).to_sparse(), TypeError, "x must be a strided tensor, got torch.sparse_coo"),
    (np.zeros(4, [("a", "f4"), ("b", "i1")])["a"], ValueError, "no multiples of its elements' 4"),
    (torch._efficientzerotensor(4), ValueError, "x is a tensor whose elements are not in memory"),
    (without_storage(torch.ones(8)[4:]), ValueError, r"\(Tensor, storage of 0 bytes\)"),
])  # fmt: skip
def test_memory_that_is_not_what_a_tensor_says_is_refused(tensor, error, sentence):
    """Of which a kernel would read other values, or from other places."""
    with pytest.raises(error, match=sentence):
        HostTensor.of(tensor, "x")
