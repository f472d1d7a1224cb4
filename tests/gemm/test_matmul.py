from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cutlass import cute
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cutex
from cutex import ops
from cutex.compile import compile
from cutex.device.epilogue.epilogue_ops import Activation, Add, Alpha, Elementwise
from cutex.dtypes import of_torch
from cutex.kernels.gemm import stage
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.general import General
from cutex.ops.matmul.arrange import result
from cutex.ops.matmul.plan import config_for
from cutex.problem.matmul import MatmulProblem, draw

ARCH = ["sm_90a", "sm_100a"]
each_arch = pytest.mark.parametrize("arch", ARCH)
# where the arch makes no difference but in the kernel, which other tests run
one_arch = pytest.mark.parametrize("arch", [ARCH[0], pytest.param(ARCH[1], marks=pytest.mark.slow)])
bf16 = torch.bfloat16


@pytest.fixture
def place(device: str, arch: str) -> Iterator[str]:
    """The device of torch's tensors: the GPU, or the CPU within the simulator."""
    with ops.simulated(arch) if device == "sim" else nullcontext():
        yield "cpu" if device == "sim" else "cuda"


def normal(place: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(bf16).to(place)


def close(c: Tensor, want: Tensor, by: float = 0.02) -> bool:
    return c.shape == want.shape and bool(((c - want).abs() <= by * (1 + want.abs())).all())


# ---- numbers


@pytest.mark.sweep(42)
@pytest.mark.parametrize("seed", range(14))
@each_arch
def test_drawn_problems_are_within_twice_torchs_error(arch: str, place: str, seed: int) -> None:
    problem = draw(seed)
    wrong = problem.run(place, cutex.matmul)
    assert wrong is None, f"{wrong}: {problem}"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_hundreds_of_drawn_problems_are_within_twice_torchs_error(tenth: int) -> None:
    for seed in range(1000 + 36 * tenth, 1036 + 36 * tenth):
        problem = draw(seed, largest=11, most_work=2**31)
        wrong = problem.run("cuda", cutex.matmul)
        assert wrong is None, f"{wrong}: {problem}"


@pytest.mark.parametrize("dtype", [bf16, torch.float8_e4m3fn, torch.float32])
def test_a_step_of_k_left_out_is_off_by_more_than_the_tolerance(
    dtype: torch.dtype,
) -> None:
    def without_the_last_step(a: Tensor, b: Tensor, out_dtype: torch.dtype, **_) -> Tensor:
        k = a.shape[-1] - 32 // a.dtype.itemsize
        return (a[..., :k].double() @ b[..., :k, :].double()).to(out_dtype)

    problem = MatmulProblem(64, 64, 2048, dtype=dtype, dtype_b=dtype, out_dtype=torch.float32)
    assert "is off by" in (problem.run("cpu", without_the_last_step) or "")


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "starved", "peer-late", "random"])
def test_the_order_of_events_does_not_matter(order: str) -> None:
    """Few CTAs, many tiles, a batch, ping-pong, a cluster, and B shared by parts of K."""
    config = GeneralConfig(
        replace(stage("sm_90a", 8).config(), num_stages=4, num_ctas=4),
        a=OperandLayout(batched=True),
        b=OperandLayout(batched=True),
        out=OperandLayout("fp32", batched=True),
        ops=(Activation("relu"),),
    )
    compiled = compile(General(config), "bf16", "sm_90a")
    a, b = normal("cpu", 2, 200, 136).round(), normal("cpu", 2, 136, 264, seed=1).round()
    out = torch.full((2, 200, 264), torch.nan)
    for seed in range(2):
        cutex.simulate(compiled, a, b, out, order=order, seed=seed)
        assert torch.equal(out, F.relu(a.float() @ b.float()))


SLOTS = {  # of a ping-pong kernel on few CTAs, with an even and an odd number of parts a slot
    "even": {"epi_n": 32, "epi_stages": 3},
    "odd": {"epi_n": 32, "epi_stages": 2, "tile_n": 160},
    "mixed": {"epi_n": 16, "epi_stages": 4, "tile_n": 144, "cluster_m": 1},
}


SLOTS_IN_ORDERS = [  # each order with one of them; the rest with -m slow
    pytest.param(name, order, marks=[pytest.mark.slow] if (i + j) % 3 else [])
    for i, name in enumerate(SLOTS)
    for j, order in enumerate(["fifo", "eager", "starved", "peer-late", "random"])
]


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "order"), SLOTS_IN_ORDERS)
def test_a_matrix_comes_in_through_the_slots_that_out_leaves_by(slots: str, order: str) -> None:
    tiles = replace(stage("sm_90a", 8).config(), num_stages=3, num_ctas=4, **SLOTS[slots])
    matrices = {name: OperandLayout(batched=True) for name in ("a", "b", "out")}
    add = Add("residual", "bf16", batched=True, whole=True)
    compiled = compile(General(GeneralConfig(tiles, **matrices, ops=(add,))), "bf16", "sm_90a")
    a, b = normal("cpu", 2, 200, 136).round(), normal("cpu", 2, 136, 512, seed=1).round()
    held = normal("cpu", 2, 200, 512, seed=2)
    want = (a.float() @ b.float() + held.float()).to(bf16)
    out = torch.full_like(want, torch.nan)
    cutex.simulate(compiled, a, b, out, held, order=order, seed=1)
    assert torch.equal(out, want)
    cutex.simulate(compiled, a, b, held, held, order=order, seed=2)  # over itself
    assert torch.equal(held, want)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("order", ["eager", "random"])
@pytest.mark.parametrize("tma", [True, False], ids=["by TMA", "by element"])
def test_odd_multiples_of_8_columns_go_through_the_epilogue(tma: bool, order: str) -> None:
    """Rows of 80 bytes, two rows of tiles: the last has 40 of 64 rows, and 24 of 40 columns."""
    tiles = Sm90Config(
        tile_m=64, tile_n=40, num_stages=4, epi_n=40, epi_stages=1, warpgroups=1, rows=2
    )
    out = OperandLayout("fp16", tma=tma)
    b = OperandLayout(major="column")
    config = GeneralConfig(tiles, b=b, out=out, ops=(Activation("relu"),))
    compiled = compile(General(config), "bf16", "sm_90a")
    a, b = normal("cpu", 104, 136).round(), normal("cpu", 264, 136, seed=1).round().mT
    stored = torch.full((104, 264 if tma else 265), torch.nan, dtype=torch.float16)[:, :264]
    report = cutex.simulate(compiled, a, b, stored, order=order, seed=1)
    assert not report.findings
    assert torch.equal(stored, F.relu(a.float() @ b.float()).half())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [bf16, torch.float8_e4m3fn])
def test_tiles_of_few_rows_are_spread_over_all_sms(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200, whatever board is here: on others the model may prefer another tile."""
    monkeypatch.setattr("cutex.ops.matmul.plan.other_board", lambda _: "")
    k = 8192 // dtype.itemsize  # of shorter K the model takes tiles side by side
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (rows, k), generator=drawn).to(dtype) for rows in (13, 8192))
    b = b.mT
    name = of_torch(dtype).name
    sizes, out = (13, 8192, k, 1), OperandLayout()
    layouts = (OperandLayout(name), OperandLayout(name, "column"), out)
    assert config_for(sizes, layouts, (), "sm_90a").tiles.spread
    assert not config_for(sizes, layouts, (Alpha(),), "sm_90a").tiles.spread
    with ops.simulated():
        assert torch.equal(cutex.matmul(a, b), (a.float() @ b.float()).bfloat16())


@pytest.mark.sweep(2)
@each_arch
def test_k_of_zero_leaves_what_the_epilogue_adds(arch: str, place: str) -> None:
    a, b, bias = normal(place, 24, 0), normal(place, 0, 40), normal(place, 40)
    out = normal(place, 24, 40, seed=1)
    want = 0.5 * out.float() + bias.float()
    assert close(cutex.matmul(a, b, bias=bias, out=out, beta=0.5).float(), want)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("n", [40, 37], ids=["by TMA", "from a copy"])
@one_arch
def test_beta_reads_what_out_holds_at_each_call(arch: str, place: str, n: int) -> None:
    """The second call uses the plan of the first."""
    a, b, out = normal(place, 24, 16), normal(place, 16, n), normal(place, 24, n, seed=1)
    want = out.float()
    for _ in range(2):
        want = a.float() @ b.float() + 0.5 * want
        cutex.matmul(a, b, out=out, beta=0.5)
        assert close(out.float(), want)


@pytest.mark.parametrize("shape", [(0, 8, 16), (8, 0, 16)])
def test_an_empty_result_needs_no_launch(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    with ops.simulated():
        assert cutex.matmul(normal("cpu", m, k), normal("cpu", k, n)).shape == (m, n)


@pytest.mark.sweep(2)
@each_arch
def test_a_function_of_ones_own_runs_in_the_epilogue(arch: str, place: str) -> None:
    @cute.jit
    def lower_triangle(x, m, n):
        y = x * x
        if m < n:
            y = y * 0.0
        return y

    a, b = normal(place, 40, 24), normal(place, 24, 48)
    want = (a.float() @ b.float()).square().tril()
    c = cutex.matmul(a, b, activation=lower_triangle, out_dtype=torch.float32)
    assert close(c, want, by=1e-4)


def test_a_function_is_given_the_row_within_its_matrix_of_a_batch() -> None:
    a, b = torch.ones(2, 16, 8, dtype=bf16), torch.ones(8, 8, dtype=bf16)
    with ops.simulated("sm_90a"):
        c = cutex.matmul(a, b, activation=lambda x, m, n: x + m)
    assert torch.equal(c, (8.0 + torch.arange(16)[:, None]).expand(2, 16, 8).to(bf16))


def test_a_batch_of_single_rows_takes_a_row_bias_of_one_number() -> None:
    a, b = torch.ones(4, 1, 8, dtype=bf16), torch.ones(8, 8, dtype=bf16)
    with ops.simulated("sm_90a"):
        c = cutex.matmul(a, b, bias=torch.tensor([[3.0]]))
    assert torch.equal(c, torch.full((4, 1, 8), 11.0, dtype=bf16))


def test_two_functions_of_one_name_are_two_kernels() -> None:
    def scaled(by: float) -> Elementwise:
        return Elementwise.of(lambda x: x * by)

    assert repr(scaled(2.0)) != repr(scaled(3.0))
    assert repr(scaled(2.0)) == repr(scaled(2.0))


FACTOR = 2.0


@pytest.mark.sweep(4)
@pytest.mark.parametrize("remembered", [False, True], ids=["first call", "with a plan"])
@one_arch
def test_a_function_is_known_by_what_it_computes(
    arch: str, place: str, remembered: bool, monkeypatch
) -> None:
    """Its key is not its line, which two lambdas share, nor itself, whose globals may change."""
    a, b = normal(place, 40, 24), normal(place, 24, 48)
    product = a.float() @ b.float()
    twice, thrice = (lambda x: x * 2.0), (lambda x: x * 3.0)  # fmt: skip
    by_global = lambda x: x * FACTOR
    for _ in range(1 + remembered):
        for activation, factor in ((twice, 2.0), (thrice, 3.0), (by_global, 2.0)):
            c = cutex.matmul(a, b, activation=activation, out_dtype=torch.float32)
            assert close(c, product * factor, by=1e-4)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    c = cutex.matmul(a, b, activation=by_global, out_dtype=torch.float32)
    assert close(c, product * 5.0, by=1e-4)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", ["gated_silu", "gated_gelu"])
@each_arch
def test_gates_leave_half_the_columns(arch: str, place: str, name: str) -> None:
    a, b, bias = normal(place, 40, 24), normal(place, 24, 48, seed=1), normal(place, 48, seed=2)
    x = a.float() @ b.float() + bias.float()
    gate = F.silu if name == "gated_silu" else F.gelu
    want = gate(x[:, 0::2]) * x[:, 1::2]
    c = cutex.matmul(a, b, bias=bias, activation=name, out_dtype=torch.float32)
    assert close(c, want, by=1e-4)


def test_tma_stores_only_rows_of_whole_units() -> None:
    """TMA writes 16 bytes at a time, over any data there, as seen on an H200."""
    memory = torch.zeros(8, 32, dtype=bf16)
    assert result(memory[:, :24])[1].tma
    assert not result(memory[:, :21])[1].tma


@pytest.mark.sweep(2)
@each_arch
def test_amax_is_the_largest_magnitude_before_rounding(arch: str, place: str) -> None:
    a, b = normal(place, 40, 24), normal(place, 24, 48)
    amax = torch.zeros(1, device=place)
    cutex.matmul(a, b, amax=amax)
    want = (a.float() @ b.float()).abs().max()
    assert close(amax[0], want, by=1e-5)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    m, n, k = 70_000, 32_768, 64
    a, b = normal("cuda", m, k), normal("cuda", k, n)
    c = cutex.matmul(a, b)
    for rows in (slice(0, 100), slice(m // 2, m // 2 + 100), slice(m - 100, m)):
        assert close(c[rows].float(), a[rows].float() @ b.float())
    wide = torch.randn(k, 2**25 + 8, device="cuda", dtype=bf16)  # B past 2^31
    c = cutex.matmul(a[:64], wide)
    assert close(c[:, -100:].float(), a[:64].float() @ wide[:, -100:].float())


# ---- torch


@one_arch
def test_gradients_are_those_of_torch(arch: str, place: str) -> None:
    leaves = [normal(place, 2, 24, 40), normal(place, 40, 32, seed=1), normal(place, 32, seed=2)]
    ours = [x.clone().requires_grad_() for x in leaves]
    torchs = [x.float().requires_grad_() for x in leaves]
    a, b, bias = ours
    cutex.matmul(
        a, b, bias=bias, activation="gelu", residual=a.sum(-1, keepdim=True)
    ).sum().backward()
    x, y, z = torchs
    (F.gelu(x @ y + z) + x.sum(-1, keepdim=True)).sum().backward()
    for got, want in zip(ours, torchs, strict=True):
        assert close(got.grad.float(), want.grad, by=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_silu", "gated_gelu"])
@each_arch
def test_gates_have_the_gradients_of_torch(arch: str, place: str, name: str) -> None:
    leaves = [normal(place, 24, 40), normal(place, 40, 32, seed=1), normal(place, 32, seed=2)]
    ours = [x.clone().requires_grad_() for x in leaves]
    torchs = [x.float().requires_grad_() for x in leaves]
    weights = torch.linspace(-1, 1, 24 * 16, device=place).view(24, 16)
    a, b, bias = ours
    (
        cutex.matmul(a, b, bias=bias, activation=name, out_dtype=torch.float32) * weights
    ).sum().backward()
    x, y, z = torchs
    before = x @ y + z
    gate = F.silu if name == "gated_silu" else F.gelu
    (gate(before[:, 0::2]) * before[:, 1::2] * weights).sum().backward()
    for got, want in zip(ours, torchs, strict=True):
        size = want.grad.abs().max()
        assert close(got.grad.float() / size, want.grad / size, by=0.01)


@pytest.mark.slow
@one_arch
def test_opcheck_finds_nothing(arch: str, place: str) -> None:
    a, b, bias = normal(place, 24, 40), normal(place, 40, 32, seed=1), normal(place, 32)
    arguments = (a.requires_grad_(), b.requires_grad_(), bias.requires_grad_())
    torch.library.opcheck(torch.ops.cutex.matmul.default, arguments)
    gate = {"activation": "gated_silu", "out_dtype": torch.float32}
    torch.library.opcheck(torch.ops.cutex.matmul.default, arguments, gate)
    out = torch.empty(24, 32, dtype=bf16, device=place)
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.cutex.matmul_out.default, (out, *(x.detach() for x in arguments))
        )


@one_arch
def test_torch_compile_makes_one_graph(arch: str, place: str) -> None:
    a, b, bias = normal(place, 24, 40), normal(place, 40, 32, seed=1), normal(place, 32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(a: Tensor, b: Tensor) -> Tensor:
        return 2 * cutex.matmul(a, b, bias=bias, activation="relu")

    assert close(layer(a, b).float(), 2 * F.relu(a.float() @ b.float() + bias.float()))


@pytest.mark.gpu
def test_a_cuda_graph_repeats_the_call() -> None:
    a, b = normal("cuda", 256, 128), normal("cuda", 128, 512, seed=1)
    c = cutex.matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cutex.matmul(a, b, out=c)
    a.mul_(2)
    c.zero_()
    graph.replay()
    assert close(c.float(), a.float() @ b.float())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_runs_on_the_gpu_and_stream_of_its_tensors() -> None:
    """Called twice, since the second call uses the plan of the first."""
    stream = torch.cuda.Stream("cuda:1")
    for dtype in (bf16, torch.float16):
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            a, b = (normal(device, *shape).to(dtype) for shape in ((256, 128), (128, 512)))
            bias, out = (
                normal(device, 512).to(dtype),
                torch.empty(256, 512, device=device).to(dtype),
            )
            want = a.float() @ b.float()
            with torch.cuda.device(0):
                for _ in range(2):
                    assert close(cutex.matmul(a, b).float(), want)
                    assert close(cutex.matmul(a, b, bias=bias).float(), want + bias.float())
                    assert close(cutex.matmul(a, b, out=out).float(), want)
                    assert torch.cuda.current_device() == 0
    a, b = normal("cuda:1", 2048, 2048), normal("cuda:1", 2048, 2048)
    want = 2 * (a.float() @ b.float())
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(stream):  # which makes cuda:1 the current GPU, too
        torch.cuda._sleep(50_000_000)
        a.mul_(2)
        with torch.cuda.device(0):
            c = cutex.matmul(a, b)
    stream.synchronize()
    assert close(c.float(), want)


def test_fake_tensors_give_the_shape_and_launch_nothing() -> None:
    with FakeTensorMode():
        a, b = torch.empty(3, 5, 7, dtype=bf16), torch.empty(7, 9, dtype=bf16)
        c = torch.ops.cutex.matmul(a, b, out_dtype=torch.float32)
    assert c.shape == (3, 5, 9) and c.dtype is torch.float32


# ---- bad input


A, B = torch.zeros(4, 8, dtype=bf16), torch.zeros(8, 16, dtype=bf16)
BAD: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "no tensor": (lambda: cutex.matmul(3, B), TypeError, "a must be a torch.Tensor, got int"),
    "a vector": (lambda: cutex.matmul(A[0], B), ValueError, "a must have at least 2 dimensions"),
    "other K": (lambda: cutex.matmul(A, A), ValueError, "b has K=4"),
    "other dtype": (lambda: cutex.matmul(A, B.half()), TypeError, "b has dtype torch.float16"),
    "integers": (lambda: cutex.matmul(A.int(), B.int()), TypeError, "a has dtype torch.int32"),
    "batches": (
        lambda: cutex.matmul(A.expand(2, 4, 8), B.expand(3, 8, 16)),
        ValueError,
        "b has batch sizes",
    ),
    "gate": (
        lambda: cutex.matmul(A, B[:, :15], activation="gated_silu"),
        ValueError,
        "takes an even N",
    ),
    "bias": (lambda: cutex.matmul(A, B, bias=A), ValueError, "bias has shape"),
    "residual": (lambda: cutex.matmul(A, B, residual=A), ValueError, "residual has shape"),
    "activation": (lambda: cutex.matmul(A, B, activation="tanh"), ValueError, "activation 'tanh'"),
    "a builtin": (
        lambda: cutex.matmul(A, B, activation=torch.relu),
        TypeError,
        "must be a Python function of one DSL Float32, or of it, its row and its column",
    ),
    "two arguments": (
        lambda: cutex.matmul(A, B, activation=lambda x, y: x),
        TypeError,
        "must be a Python function of one DSL Float32, or of it, its row and its column",
    ),
    "out": (lambda: cutex.matmul(A, B, out=A), ValueError, "out has shape"),
    "out_dtype": (lambda: cutex.matmul(A, B, out_dtype=torch.int8), TypeError, "out_dtype"),
    "overlap": (
        lambda: cutex.matmul(A, B, out=torch.zeros(1, 16, dtype=bf16).expand(4, 16)),
        ValueError,
        "has strides (0, 1): its elements overlap",
    ),
    "beta": (lambda: cutex.matmul(A, B, beta=1.0), ValueError, "out must be given"),
    "scale": (lambda: cutex.matmul(A, B, scale_a=A), TypeError, "scale_a must be float32"),
    "no GPU": (lambda: cutex.matmul(A, B), ValueError, "with cutex.ops.simulated()"),
}


@pytest.mark.parametrize(("call", "kind", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_in_one_sentence(call, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert sentence in str(error.value) and "\n" not in str(error.value)
