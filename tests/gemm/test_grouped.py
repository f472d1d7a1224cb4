"""Grouped GEMM: right against float64 whatever the groups are, and silent beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cutex
from cutex import ops
from cutex.arch import arch as arch_named
from cutex.compile import compile
from cutex.kernels.gemm.grouped import choose
from cutex.kernels.gemm.grouped.config import GatheredConfig, GroupedConfig, SumsConfig
from cutex.kernels.gemm.grouped.zeros import Zeros, ZerosConfig
from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.ops.grouped import function, launch
from cutex.problem.grouped import GroupedProblem, draw

ARCHS = ["sm_90a", "sm_100a"]
each_arch = pytest.mark.parametrize("arch", ARCHS)
bf16 = torch.bfloat16
ORDERS = ("fifo", "eager", "starved", "peer-late", "random")


@pytest.fixture
def place(device: str, arch: str) -> Iterator[str]:
    """The device of torch's tensors: the GPU, or the CPU within the simulator."""
    with ops.simulated(arch) if device == "sim" else nullcontext():
        yield "cpu" if device == "sim" else "cuda"


# ---- numbers


@pytest.mark.sweep(40)
@pytest.mark.parametrize("seed", range(16))
@each_arch
def test_randomized_problems_are_right(arch: str, device: str, seed: int) -> None:
    orders: dict[str, Any] = {"order": ORDERS[seed % len(ORDERS)], "seed": seed}
    with ops.simulated(arch, **orders) if device == "sim" else nullcontext():
        problem = draw(seed)
        wrong = problem.run("cpu" if device == "sim" else "cuda", cutex.grouped_mm)
    assert wrong is None, f"{wrong}: {problem}"


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
@each_arch
def test_a_hundred_randomized_problems_are_right(arch: str, device: str, tenth: int) -> None:
    for seed in range(100 + 10 * tenth, 110 + 10 * tenth):
        order = ORDERS[seed % len(ORDERS)]
        with ops.simulated(arch, order=order, seed=seed) if device == "sim" else nullcontext():
            problem = draw(seed, largest=150 if device == "sim" else 1000)
            wrong = problem.run("cpu" if device == "sim" else "cuda", cutex.grouped_mm)
        assert wrong is None, f"{wrong}: {problem}"


@pytest.mark.parametrize("form", ["rows", "padded", "sums"])
def test_a_row_left_out_is_off_by_more_than_the_tolerance(form: str) -> None:
    def without_a_row(x: Tensor, w: Tensor, **edges: Tensor) -> Tensor:
        problem_w = w.double().clone()
        problem_w[..., 3, :] = 0
        return problem.reference(x.double(), problem_w).nan_to_num(0).to(bf16)

    problem = GroupedProblem((70, 0, 9), 64, 128, form, rest=3)
    assert " is " in (problem.run("cpu", without_a_row) or "")


# ---- beside the groups

TILES = {
    "sm_90a": {
        "cooperative": Sm90Config(
            tile_m=128, tile_n=64, num_stages=3, epi_n=64, epi_stages=1, warpgroups=2, num_ctas=3
        ),
        "shared": Sm90Config(
            tile_m=128, tile_n=64, num_stages=3, epi_n=32, epi_stages=2, warpgroups=2, cluster_m=2,
            num_ctas=4,
        ),
        "ping-pong": Sm90Config(
            tile_m=64, tile_n=64, num_stages=4, epi_n=64, epi_stages=1, warpgroups=2,
            pingpong=True, cluster_n=2, num_ctas=4,
        ),
    },
    "sm_100a": {
        "256": Sm100Config(
            tile_m=256, tile_n=64, num_stages=3, epi_n=32, epi_stages=2, pair=True, num_acc=2,
            num_ctas=4,
        ),
        "512": Sm100Config(
            tile_m=512, tile_n=64, num_stages=3, epi_n=32, epi_stages=2, pair=True, num_acc=2,
            num_ctas=4,
        ),
    },
}  # fmt: skip
CONFIGS = [(arch, name) for arch, tiles in TILES.items() for name in tiles]


def kernel(arch: str, name: str, kind: str, config: Any) -> Any:
    folder = arch.removesuffix("a").replace("_", "")
    module = import_module(f"cutex.kernels.gemm.grouped.{folder}.{kind}")
    return compile(getattr(module, f"Grouped{kind.capitalize()}")(config), "bf16", arch)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("order", ["fifo", "random"])
@pytest.mark.parametrize(("arch", "name"), CONFIGS)
def test_rows_of_no_group_and_memory_around_are_left_alone(
    arch: str, name: str, order: str
) -> None:
    """Few CTAs, several tiles each; the same kernel again with other groups."""
    layouts = OperandLayout(), OperandLayout(batched=True), OperandLayout()
    config = GroupedConfig(GeneralConfig(TILES[arch][name], *layouts))
    compiled = kernel(arch, name, "rows", config)
    for rows in ((60, 0, 140, 1, 99), (0, 7, 0, 0, 200)):
        problem = GroupedProblem(rows, 136, 72, rest=20, seed=len(name))
        x, w = problem.inputs()
        memory = torch.full((problem.length + 2, 144), torch.nan, dtype=bf16)
        out = memory[1:-1, :136]
        report = cutex.simulate(compiled, x, w, out, problem.edges, order=order, seed=1)
        assert not report.findings
        check = problem.check(x, w, out)
        assert check.ok, check.message
        memory[1 : 1 + sum(rows), :136] = torch.nan
        assert memory.isnan().all()


@pytest.mark.sweep(12)
@pytest.mark.parametrize("order", ["fifo", "random"])
@pytest.mark.parametrize(("arch", "name"), CONFIGS)
def test_sums_take_the_rows_of_their_group_alone(arch: str, name: str, order: str) -> None:
    """Rows of no group are NaN; groups of less than a step, of several, and of none."""
    column, row = OperandLayout(major="column"), OperandLayout()
    product = GeneralConfig(TILES[arch][name], column, row, OperandLayout(batched=True))
    compiled = kernel(arch, name, "sums", SumsConfig(product))
    problem = GroupedProblem((60, 0, 140, 1, 0), 136, 72, "sums", rest=20, seed=len(name))
    x, w = problem.inputs()
    (out,) = problem.outputs()
    report = cutex.simulate(compiled, x, w, out, problem.edges, order=order, seed=1)
    assert not report.findings
    check = problem.check(x, w, out)
    assert check.ok, check.message
    assert not out[1].any() and not out[4].any()


def test_sums_like_those_before_are_launched_without_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of no rows, which launch nothing themselves."""
    found: list[Any] = []

    def repeated(kinds: Any, passed: list[Tensor], place: int) -> Any:
        found.append((kinds, place))
        return lambda *_: passed[place] + len(found)

    monkeypatch.setattr(function, "repeated", repeated)
    x, w, offs = torch.zeros(0, 16, dtype=bf16), torch.zeros(0, 8, dtype=bf16), torch.zeros(3)
    with ops.simulated("sm_90a"):
        results = [cutex.grouped_mm(x.mT, w, offs.int()) for _ in range(3)]
    assert found == [([("sums", (False,))], 2)]
    assert [y.unique().tolist() for y in results] == [[0], [0], [1]]
    assert all(y.shape == (3, 16, 8) for y in results)


@pytest.mark.parametrize(
    ("padded", "ends"), [(False, [3, 3, 9]), (True, [2, 5, 0]), (False, [9] * 40 + [-2])]
)
@pytest.mark.parametrize("whole", [False, True])
def test_zeros_are_written_behind_the_groups_alone(
    whole: bool, padded: bool, ends: list[int]
) -> None:
    """Also where the last end is too early, whose group is empty."""
    memory = torch.full((15, 24), 7.0, dtype=bf16)
    out = memory[:, :16] if whole else memory[:, 1:18]
    edges = torch.tensor(ends, dtype=torch.int32)
    compiled = compile(Zeros(ZerosConfig(whole, padded)), "bf16", "sm_90a")
    assert not cutex.simulate(compiled, out, edges).findings
    want = torch.full((15, 24), 7.0, dtype=bf16)
    rest = [2, 3, 4, 10, 11, 12, 13, 14] if padded else list(range(9, 15))
    want[rest, (0 if whole else 1) : (16 if whole else 18)] = 0
    assert torch.equal(memory, want)


# ---- rows by an index


GATHER_TILES = {
    "cooperative": replace(TILES["sm_90a"]["cooperative"], num_stages=4),
    "one": replace(TILES["sm_90a"]["cooperative"], tile_m=64, warpgroups=1, num_stages=3),
    "ping-pong": replace(TILES["sm_90a"]["ping-pong"], cluster_n=1, cluster_m=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"), [("cooperative", "random"), ("one", "fifo"), ("ping-pong", "random")]
)
def test_a_kernel_that_gathers_leaves_what_is_beside_alone(name: str, order: str) -> None:
    layouts = OperandLayout(), OperandLayout(batched=True), OperandLayout()
    compiled = kernel(
        "sm_90a", "", "gathered", GatheredConfig(GeneralConfig(GATHER_TILES[name], *layouts))
    )
    problem = GroupedProblem((60, 0, 140, 1, 9), 136, 128, rest=9)
    x, w = problem.inputs()
    g = torch.Generator().manual_seed(1)
    index = torch.randperm(problem.length, generator=g).int()
    memory = torch.full((problem.length + 2, 136), torch.nan, dtype=bf16)
    shuffled = torch.empty_like(x)
    shuffled[index.long()] = x
    out = memory[1:-1]
    given = shuffled, w, out, problem.edges, index
    assert not cutex.simulate(compiled, *given, order=order, seed=1).findings
    check = problem.check(x, w, out)
    assert check.ok, check.message
    memory[1 : 1 + sum(problem.rows)] = torch.nan
    assert memory.isnan().all()


class Gathered(NamedTuple):
    """A product of gathered rows with a bias and scales, those of rows of no group being NaN."""

    problem: GroupedProblem
    x: Tensor
    w: Tensor
    index: Tensor
    scale: Tensor
    options: dict[str, Any]

    @staticmethod
    def of(k: int, activation: str | None, place: str) -> Gathered:
        problem = GroupedProblem((40, 0, 70, 1), 72, k, rest=3, bias=True)
        x, w, bias = (t.nan_to_num(0).to(place) for t in problem.inputs())
        g = torch.Generator().manual_seed(1)
        index = torch.randint(0, 50, (problem.length,), generator=g).int().to(place)
        scale = torch.randn(problem.length, generator=g).to(place)
        scale[sum(problem.rows) :] = math.nan
        options = {"bias": bias, "activation": activation}
        return Gathered(problem, x, w, index, scale, options)

    def off(self) -> tuple[float, Tensor]:
        """The largest error of the rows of groups, beside 1 or their size, and the result."""
        problem, x, w, index, scale, options = self
        edges, count = problem.edges.to(x.device), sum(problem.rows)
        y = cutex.grouped_mm(x, w, edges, index=index, row_scale=scale, **options)
        want = replace(problem, activation=options["activation"]).reference(
            x.detach()[index.long()], w, options["bias"]
        )
        want = (want * scale[:, None].double())[:count]
        assert y.shape[0] == problem.length
        return float(((y[:count].detach().double() - want).abs() / (want.abs() + 1)).max()), y


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("k", "activation"), [(128, "gated_silu"), (72, None)])
@each_arch
def test_rows_are_gathered_and_scaled(
    arch: str, place: str, k: int, activation: str | None
) -> None:
    """K of 72 is gathered before the kernel."""
    assert Gathered.of(k, activation, place).off()[0] < 2.0**-6


@pytest.mark.slow
@pytest.mark.parametrize(("k", "activation"), [(128, "gated_silu"), (72, None)])
@each_arch
def test_gathered_rows_have_gradients(
    arch: str, place: str, k: int, activation: str | None
) -> None:
    case = Gathered.of(k, activation, place)
    case.x.requires_grad_()
    off, y = case.off()
    assert off < 2.0**-5
    y[: sum(case.problem.rows)].float().sum().backward()
    grad = case.x.grad
    assert grad is not None and not grad[50:].any() and grad[:50].any()


# ---- gradients


def gradients(problem: GroupedProblem, place: str) -> None:
    """Compare the gradients of x, w and bias with float64's."""
    x, w, *bias = (t.detach().requires_grad_() for t in problem.inputs(place))
    edges = {"counts" if problem.form == "padded" else "offs": problem.edges.to(place)}
    options = {"bias": bias[0]} if bias else {}
    y = cutex.grouped_mm(x, w, **edges, **options, activation=problem.activation)
    wide = [t.detach().double().requires_grad_() for t in (x, w, *bias)]
    wanted = problem.reference(*wide)
    g = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=g).to(problem.dtype).to(place)
    y *= 1  # in place, as torch's own result
    y.backward(dy)
    belongs = wanted.isfinite()
    wanted[belongs].backward(dy.double()[belongs])
    for found, want in zip((x, w, *bias), wide, strict=True):
        assert found.grad is not None and found.grad.dtype == problem.dtype
        other = want.grad.nan_to_num(0)
        error = (found.grad.double() - other).abs() / (other.abs() + other.abs().mean() + 1e-6)
        # an activation's input is rounded once more
        assert float(error.max()) <= (2**-5 if problem.activation else 2**-7)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("form", ["rows", "padded", "sums"])
@pytest.mark.parametrize("transposed", [False, True])
@each_arch
def test_gradients_are_products_of_groups(
    arch: str, place: str, form: str, transposed: bool
) -> None:
    problem = GroupedProblem(
        (40, 0, 70, 1), 72, 64, form, rest=9, transposed=transposed, bias=form != "sums"
    )
    gradients(problem, place)


def test_the_gradient_of_row_scale_ignores_rows_of_no_group(monkeypatch) -> None:
    """They hold anything, such as NaN, and their gradient is zero."""
    y, offs = torch.tensor([[1.0, 2], [3, 4], [5, torch.nan]]), torch.tensor([1, 2])
    monkeypatch.setattr(function, "_rows", lambda *args, **options: y)
    scale = torch.ones(3, requires_grad=True)
    function._gathered(y, y, offs, None, None, None, scale, False)[:2].sum().backward()
    assert scale.grad.tolist() == [3, 7, 0]


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["gelu", "gated_silu"])
def test_an_activation_is_differentiated(activation: str) -> None:
    problem = GroupedProblem((40, 0, 30), 64, 64, bias=True, activation=activation)
    with ops.simulated("sm_90a"):
        gradients(problem, "cpu")


@pytest.mark.slow
def test_gradients_of_gradients() -> None:
    problem = GroupedProblem((20, 0, 9), 16, 8, dtype=torch.float16, rest=2)
    x, w = (t.nan_to_num(0).requires_grad_() for t in problem.inputs())
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    with ops.simulated("sm_90a"):
        y = cutex.grouped_mm(x, w, problem.edges)[:29]
        (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        (dw,) = torch.autograd.grad(dx.float().sum(), w)
    yd = problem.reference(*wide)[:29]
    (dxd,) = torch.autograd.grad(yd.square().sum(), wide[0], create_graph=True)
    (dwd,) = torch.autograd.grad(dxd.sum(), wide[1])
    assert float((dw.double() - dwd).abs().max()) < 2**-6 * float(dwd.abs().max())


# ---- forms, limits, torch


def test_matrices_of_groups_times_columns_of_groups() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=g).to(bf16) for s in ((3, 24, 40), (40, 60)))
    with ops.simulated("sm_90a"):
        y = cutex.grouped_mm(x, w, torch.tensor([11, 11, 60], dtype=torch.int32))
    want = torch.cat((x[0].float() @ w[:, :11].float(), x[2].float() @ w[:, 11:].float()), 1)
    assert y.shape == (24, 60) and torch.allclose(y.float(), want, atol=0.06, rtol=0.01)


def test_sizes_of_zero() -> None:
    offs = torch.tensor([0, 5], dtype=torch.int32)
    x, w = torch.zeros(5, 8, dtype=bf16), torch.zeros(2, 8, 16, dtype=bf16)
    bias = torch.ones(2, 16, dtype=bf16)
    with ops.simulated("sm_90a"):
        assert cutex.grouped_mm(x[:0], w, 0 * offs).shape == (0, 16)
        assert cutex.grouped_mm(x, w[..., :0], offs).shape == (5, 0)
        y = cutex.grouped_mm(x[:, :0], w[:, :0], offs, bias=bias)
        assert torch.equal(y, torch.ones(5, 16, dtype=bf16))
        sums = cutex.grouped_mm(x[:0].mT, torch.zeros(0, 16, dtype=bf16), 0 * offs)
        assert torch.equal(sums, torch.zeros(2, 8, 16, dtype=bf16))


X, W, OFFS = (
    torch.zeros(6, 8, dtype=bf16),
    torch.zeros(2, 8, 16, dtype=bf16),
    torch.tensor([2, 6], dtype=torch.int32),
)
GATE = "gated_silu"
BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no tensor": (TypeError, "x must be a torch.Tensor, got list", {"x": [1]}),
    "dtype": (TypeError, "x must be bfloat16 or float16, got torch.float32", {"x": X.float()}),
    "unlike": (TypeError, "w is torch.float16, but x is torch.bfloat16", {"w": W.half()}),
    "no edges": (ValueError, "takes offs or counts", {"offs": None}),
    "both edges": (ValueError, "takes offs or counts", {"counts": OFFS}),
    "int64": (TypeError, "offs must be int32, got torch.int64", {"offs": OFFS.long()}),
    "a matrix": (ValueError, r"offs must be \(E,\), got \(1, 2\)", {"offs": OFFS[None]}),
    "no groups": (ValueError, "offs has 0 groups, there may be 1 to 1024", {"offs": OFFS[:0]}),
    "other groups": (ValueError, "w has 2 matrices, but offs has 1 groups", {"offs": OFFS[:1]}),
    "inner": (ValueError, "where they are multiplied.*got 7 and 8", {"x": X[:, :7]}),
    "form": (ValueError, "grouped_mm takes x", {"x": X[0]}),
    "bias": (ValueError, r"bias must have shape \(2, 16\)", {"bias": W[0]}),
    "activation": (ValueError, "activation must be one of relu", {"activation": "tanh"}),
    "odd gate": (ValueError, "takes pairs of columns", {"activation": GATE, "w": W[..., :9]}),
    "index": (TypeError, "index must be int32, got torch.int64", {"index": OFFS.long()}),
    "scale": (ValueError, r"row_scale must be \(6,\), one for each row, got \(2,\)", {
        "row_scale": torch.ones(2)}),
    "sparse scale": (ValueError, "row_scale must be a strided tensor, got torch.sparse_coo", {
        "row_scale": torch.ones(6).to_sparse()}),
    "scale of padded": (ValueError, "index, row_scale and out take x", {
        "x": X[None].expand(2, 6, 8), "offs": None, "counts": OFFS, "row_scale": torch.ones(6)}),
    "fused sums": (ValueError, "bias and activation", {"x": X.mT, "w": X, "activation": GATE}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence(name: str) -> None:
    error, sentence, given = BAD[name]
    arguments: dict[str, Any] = {"x": X, "w": W, "offs": OFFS, **given}
    with ops.simulated("sm_90a"), pytest.raises(error, match=sentence):
        cutex.grouped_mm(arguments.pop("x"), arguments.pop("w"), **arguments)


def test_a_device_without_kernels_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"x is on cpu: cutex\.grouped_mm runs on a Hopper"):
        cutex.grouped_mm(X, W, OFFS)


@pytest.mark.parametrize("activation", [None, "gated_silu"])
def test_shapes_and_strides_are_known_without_memory(activation: str | None) -> None:
    x, w = torch.zeros(6, 8, dtype=bf16), torch.zeros(2, 8, 18, dtype=bf16)
    with ops.simulated("sm_90a"):
        real = cutex.grouped_mm(x, w, OFFS, activation=activation)
    with FakeTensorMode() as mode:
        x, w, offs = (mode.from_tensor(t) for t in (x, w, OFFS))
        y = cutex.grouped_mm(x, w, offs, activation=activation)
    assert (y.shape, y.stride(), y.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.slow
def test_torch_compile_takes_it_as_a_whole() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return cutex.grouped_mm(x, w, offs, activation="relu") * 2

    problem = GroupedProblem((20, 0, 9), 16, 8, activation="relu")
    x, w = problem.inputs()
    with ops.simulated("sm_90a"):
        y = layer(x, w.requires_grad_(), problem.edges)
        y.float().sum().backward()
    check = problem.check(x, w.detach(), y.detach() / 2)
    assert check.ok, check.message
    assert w.grad is not None and not w.grad[1].any() and w.grad[0].any()


@pytest.mark.sweep(2)
@each_arch
@pytest.mark.parametrize("groups", [1, 33, 1024])
def test_the_tiles_that_are_chosen_fit(arch: str, groups: int) -> None:
    row, batch = OperandLayout(), OperandLayout(batched=True)
    most = choose.most_groups(groups)
    for mean in (1, 64, 97, 200, 600, 1500, 4096):
        for n in (8, 65, 192, 2880, 7168):
            for fused, ragged in ((False, False), (True, False), (False, True), (True, True)):
                tiles = choose.rows_tiles(arch, mean, (n, n), fused, most, ragged=ragged)
                product = GeneralConfig(tiles, row, batch, row)
                config = GroupedConfig(product, most)
                assert config.why_not(arch_named(arch)) is None
                assert launch.on_sms(config, 114).product.tiles.num_ctas == 114
                if arch == "sm_90a":  # along N, others have atoms of fewer bytes than a swizzle
                    tiles = choose.rows_tiles(arch, mean, (n, n), fused, ragged=ragged, by_k=False)
                    assert tiles.tile_n % 64 == 0
            column = replace(row, major="column")
            product = GeneralConfig(choose.sums_tiles(arch, mean, n, most), column, row, batch)
            assert SumsConfig(product, most).why_not(arch_named(arch)) is None


def test_few_rows_of_a_long_k_take_narrow_tiles_and_of_a_short_one_wide_ones() -> None:
    def columns(mean: int, k: int, n: int, groups: int = 8) -> int:
        return choose.rows_tiles("sm_90a", mean, (k, n), False, groups=groups).tile_n

    assert [columns(mean, 14336, 4096) for mean in (33, 128, 129)] == [128, 128, 256]
    assert [columns(mean, 7168, 4096, 32) for mean in (48, 49)] == [128, 256]
    assert columns(64, 4096, 4096) == 256
    assert [columns(4, k, 28672) for k in (4096, 7168)] == [192, 128]
    assert choose.gathered_tiles(4, (4096, 28672), True).tile_n == 192


def test_tiles_of_long_groups_share_matrices_only_where_groups_may_be_whole_pairs_of_them() -> None:
    def sharers(mean: int, k: int, n: int) -> tuple[int, int]:
        tiles = choose.rows_tiles("sm_90a", mean, (k, n), False)
        assert isinstance(tiles, Sm90Config)
        return tiles.cluster_m, tiles.cluster_n

    assert [sharers(mean, 7168, 4096) for mean in (8192, 8191, 1024)] == [(2, 1), (1, 2), (1, 2)]
    assert [sharers(mean, 4096, 28672) for mean in (4096, 1024)] == [(1, 2)] * 2
    assert [sharers(mean, 2048, 2048) for mean in (256, 257)] == [(2, 1), (1, 1)]


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_groups() -> None:
    problem = GroupedProblem((100, 0, 300, 5), 264, 136, rest=95)
    x, w = problem.inputs("cuda")
    x = x.nan_to_num(1.0)
    offs = problem.edges.cuda()
    cutex.grouped_mm(x, w, offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cutex.grouped_mm(x, w, offs)
    for rows in ((100, 0, 300, 5), (0, 500, 0, 0), (1, 2, 3, 494)):
        other = replace(problem, rows=rows, rest=500 - sum(rows))
        offs.copy_(other.edges)
        y.fill_(math.nan)
        graph.replay()
        check = other.check(x, w, y)
        assert check.ok, check.message
        assert y[sum(rows) :].isnan().all()
