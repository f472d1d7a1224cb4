"""The fp8 kernel with factors of blocks: exact on integers under orders, within the bound of tensor
cores on other data; planted faults of its factors are found."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import pytest
import torch
from cutlass import Int32, cute

import cutex
from cutex import ops
from cutex.arch import arch
from cutex.bench import run as bench
from cutex.compile import compile
from cutex.device.epilogue.epilogue_ops import Add, Bias
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.scaled.fp8 import LADDERS, cost_model, promoted
from cutex.kernels.gemm.scaled.fp8.config import PROMOTED, Fp8Config
from cutex.kernels.gemm.scaled.fp8.sm90 import kernel, promote
from cutex.kernels.gemm.scaled.fp8.sm90.kernel import Fp8Gemm, Fp8Signature
from cutex.ops.matmul import choices
from cutex.ops.matmul.plan import forget
from cutex.problem.scaled import Fp8Problem
from cutex.schedulers import announced
from cutex.sim import simulate

H200 = arch("sm_90a")
SQUARE = Fp8Config(tile_m=128, tile_n=128, num_stages=3, warpgroups=2, epi_n=64, epi_stages=1)
CASES = {
    "two warpgroups": (SQUARE, (136, 264, 640)),
    "two waves of rows": (replace(SQUARE, tile_m=256), (300, 136, 400)),
    "shared B": (replace(SQUARE, tile_n=192, cluster_m=2, num_ctas=2), (520, 400, 528)),
    "boundaries of 16 columns": (
        replace(SQUARE, tile_n=144, epi_n=16, num_ctas=3), (136, 1168, 400),
    ),
    "boundaries, alternating": (
        replace(SQUARE, tile_m=64, tile_n=80, epi_n=16, num_stages=4, alternating=True, rows=3),
        (150, 648, 784),
    ),
    "boundaries, split K": (
        replace(SQUARE, tile_n=96, epi_n=32, split_k=2, rows=2), (136, 392, 1040),
    ),
    "both by rows": (
        replace(SQUARE, tile_n=160, epi_n=32, cluster_n=2, recipe="fp8_1x128"), (130, 328, 528),
    ),
    "swapped, split K": (
        replace(SQUARE, tile_n=64, epi_n=32, swap_ab=True, split_k=3, columns=1), (61, 264, 784),
    ),
    "few rows": (
        replace(SQUARE, tile_m=64, warpgroups=1, tile_n=32, epi_n=32, swap_ab=True, columns=1),
        (24, 264, 784),
    ),
    "alternating": (
        replace(SQUARE, tile_m=64, epi_n=32, num_stages=4, alternating=True, rows=2),
        (100, 264, 784),
    ),
    "alternating, shared A, one block": (
        replace(SQUARE, epi_n=32, alternating=True, rows=1, cluster_n=2), (128, 264, 128),
    ),
    "alternating, swapped": (
        replace(SQUARE, tile_m=64, tile_n=96, epi_n=32, recipe="fp8_1x128", swap_ab=True,
                alternating=True, columns=1),
        (90, 264, 1040),
    ),
}  # fmt: skip


def run(tiles: Fp8Config, problem: Fp8Problem, cache: bool = True, **order: object):
    """The check of a simulated launch, and what the simulator found."""
    compiled = compile(Fp8Gemm(Fp8Signature.of(tiles)), tiles.recipe, "sm_90a", cache=cache)
    a, b, *scales = problem.inputs()
    (out,) = problem.outputs()
    report = simulate(compiled, a, b.mT, *scales, out, **order)
    return problem.check(a, b, *scales, out), report.findings


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", CASES)
def test_integers_are_exact_in_any_order(name):
    tiles, mnk = CASES[name]
    for order in ("fifo", "random"):
        problem = Fp8Problem(*mnk, dtype=tiles.recipe, init="int", seed=1)
        check, findings = run(tiles, problem, order=order, seed=2)
        assert check.ok and not findings, check.message


@pytest.mark.sweep(2)
@pytest.mark.parametrize("init", ["normal", "spread"])
def test_other_data_is_as_exact_as_tensor_cores_allow(init):
    tiles, (m, n, _) = CASES["two warpgroups"]
    problem = Fp8Problem(m, n, 1040, init=init)
    check, findings = run(tiles, problem)
    assert check.ok and not findings, check.message


@pytest.mark.slow
@pytest.mark.parametrize("stage", LADDERS.stages("sm_90a"), ids=lambda s: f"stage {s.number}")
def test_each_stage_of_the_ladder_is_exact(stage):
    for dtype in Fp8Problem.dtypes[: 1 if stage.number else 2]:
        result = bench.run(Fp8Problem(200, 264, 640, dtype=dtype, init="int"), stage, "sim")
        assert result.ok, result.message


@pytest.mark.parametrize("tile_n", [64, 80, 96, 128, 144, 160, 168, 176, 192, 256])
def test_each_group_of_columns_has_the_factor_of_its_block(tile_n):
    tiles = replace(SQUARE, tile_n=tile_n)
    for n in range(33):
        first = n * tile_n
        tile = promote.TileFactors(tiles, (None, None), (None, None), None)
        places = tile.boundaries
        before = min(128 - first % 128, tile_n)
        assert not places or before in places
        tile = replace(tile, before=before if places else 0)
        steps = [(first + x) // 128 for x in tile.column_steps]
        for group, step in enumerate(tile.step_of_group):
            column = first + group * tiles.column_group
            assert steps[step] == column // 128 == (column + tiles.column_group - 1) // 128


class NextBlock(promote.TileFactors):
    """Reads the factors that 128 rows share of the next block of K."""

    def load_shared(self, k_tile):
        return super().load_shared(k_tile + 1)


class OtherRow(promote.ThreadFactors):
    """Gives this thread's second row the first one's factor."""

    def of(self, eight):
        first, _ = super().of(eight)
        return [first, first]


class OneFactor(promote.TileFactors):
    """Takes the first 128 columns' factor for all columns of the tile."""

    def shared(self):
        return [(side, self.tile.n * 0 if side else row) for side, row in super().shared()]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (promote, "TileFactors", NextBlock),
        (promote, "ThreadFactors", OtherRow),
        (promote, "TileFactors", OneFactor),
    ],
)
def test_a_factor_of_another_place_is_found(place, name, wrong, monkeypatch):
    monkeypatch.setattr(place, name, wrong)
    check, _ = run(SQUARE, Fp8Problem(136, 264, 640, init="int"), cache=False)
    assert not check.ok and check.max_error > 0


@pytest.mark.slow
def test_a_slot_released_before_its_factors_are_read_is_found(monkeypatch):
    class Late(promote.TileFactors):
        """Reads factors of the slot before, which is being filled anew."""

        def rows(self, slot, wave):
            return super().rows((slot + 2) % 3, wave)

    monkeypatch.setattr(promote, "TileFactors", Late)
    try:
        check, findings = run(SQUARE, Fp8Problem(136, 136, 1024, init="int"), cache=False)
    except Exception as error:
        assert "race" in str(error) or "smem" in str(error), error
    else:
        assert findings or not check.ok


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"recipe": "mxfp8"}, "recipe=mxfp8: takes formats with a factor for each 128 of K"),
        ({"k_bytes": 256}, "k_bytes=256: a factor serves 128 bytes of K"),
        ({"pingpong": True}, "sums are scaled by tiles of all warpgroups"),
        ({"tile_m": 256, "tile_n": 256}, "384 accumulators a thread|320 accumulators a thread"),
        ({"alternating": True}, "alternating: two warpgroups, one tile a CTA"),
        ({"alternating": True, "rows": 1, "tile_n": 32, "epi_n": 32}, "64 columns and more"),
        ({"num_stages": 8}, "more than the 232448 that a CTA has"),
    ],
)
def test_a_config_that_does_not_fit_says_why(more, says):
    with pytest.raises(ValueError, match=says):
        Fp8Gemm(Fp8Signature.of(replace(SQUARE, **more)))
    assert replace(SQUARE).why_not(None, arch("sm_90a")) is None


@pytest.mark.slow
def test_alternating_warpgroups_store_sums_behind_a_bias_and_an_addition():
    """In fp32, whose parts are narrower, and with as many slots as could hold what is added."""
    tiles = replace(CASES["alternating"][0], epi_stages=2, rows=1)
    out = OperandLayout("fp32")
    ops = Bias("column", "fp32"), Add("residual", "fp32", whole=True)
    compiled = compile(Fp8Gemm(Fp8Signature.of(tiles, out, ops)), tiles.recipe, "sm_90a")
    problem = Fp8Problem(60, 136, 384, init="int")
    a, b, *scales = problem.inputs()
    bias, residual = torch.arange(136.0), torch.arange(60 * 136.0).view(60, 136)
    got, plain = torch.full((60, 136), torch.nan), problem.outputs()[0]
    found = simulate(compiled, a, b.mT, *scales, got, bias, residual).findings
    plain.copy_(got - bias - residual)
    check = problem.check(a, b, *scales, plain)
    assert check.ok and not found, check.message


class ReadNotAwaited(announced.AnnouncedTiles):
    """Writes a tile over one that may be unread."""

    @cute.jit
    def announce(self, walk):
        state = PipelineState(announced.DEPTH, Int32(0), Int32(1))
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            tile = walk.tile_at(index)
            with cute.arch.elect_one():
                self.write(tile, state.slot)
                self.announced.arrive(state.slot)
            state.advance()


class NotAwaited(announced.AnnouncedTiles):
    """Reads a tile that may not be written yet."""

    def take(self, state):
        return WorkTile(self.words[0, state.slot], self.words[1, state.slot])


class SameFactors(promote.Coming):
    """Fetches the first factors of this tile again, instead of the next one's."""

    @cute.jit
    def look(self, begin, end):
        if (begin == 0) & self.more:
            self.following.put(self.announced.take(self.reader))
        if cutlass.const_expr(self.ahead is not None):
            if begin + promote.LANES < end:
                self.ahead.store(self.factors.ahead(begin + promote.LANES).load())
            else:
                self.ahead.store(self.factors.ahead(0).load())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (kernel, "AnnouncedTiles", ReadNotAwaited),
        (kernel, "AnnouncedTiles", NotAwaited),
        (promote, "Coming", SameFactors),
    ],
)
def test_a_fault_of_announced_tiles_is_found(place, name, wrong, monkeypatch):
    monkeypatch.setattr(place, name, wrong)
    tiles = replace(SQUARE, num_ctas=1)
    try:
        check, findings = run(tiles, Fp8Problem(136, 520, 256, init="int"), cache=False)
    except Exception as error:
        assert any(word in str(error) for word in ("race", "smem", "deadlock")), error
    else:
        assert findings or not check.ok


def test_the_promotion_adds_in_fp32():
    """With 8192 of K and sums beyond 13 bits, integers stay exact only if blocks add up in fp32."""
    problem = Fp8Problem(64, 64, 4096, init="int")
    tensors = list(problem.inputs())
    for x in tensors[:2]:
        x.fill_(3.0)  # 9 * 4096 takes 16 bits
    tensors[0][:, ::128] = 1.0
    for x in tensors[2:]:
        x.fill_(1.0)
    (out,) = problem.outputs()
    tiles = replace(SQUARE, tile_m=64, tile_n=64, warpgroups=1)
    compiled = compile(Fp8Gemm(Fp8Signature.of(tiles)), tiles.recipe, "sm_90a")
    a, b, *scales = tensors
    simulate(compiled, a, b.mT, *scales, out)
    check = problem.check(*tensors, out)
    assert check.ok, check.message


def shares_of_loads(sizes: tuple[int, int, int, int]) -> int:
    """The CTAs that share what the chosen config for sums without factors loads."""
    chosen = promoted.ranked(sizes, H200)[0]
    assert isinstance(chosen, Fp8Config)
    return chosen.cluster_m * chosen.cluster_n


@pytest.mark.parametrize("recipe", [PROMOTED, "fp8_block"])
def test_many_rows_may_be_columns_and_few_tiles_have_shares_of_k(recipe: str) -> None:
    """Tiles of more than four rows of them, with factors and without."""

    def of(m: int, n: int, k: int) -> list[Fp8Config]:
        tiles = cost_model.candidates(Fp8Problem(m, n, k), H200.num_sms, recipe=recipe)
        return sorted(tiles, key=lambda c: cost_model.predict(c, Fp8Problem(m, n, k), H200))[:24]

    assert any(c.swap_ab for c in of(1056, 1280, 7296))
    few = of(1184, 128, 3648)
    assert few[0].split_k > 1 and {c.swap_ab for c in few} == {False, True}


def test_sums_without_factors_share_loads_of_rows_that_are_two_lines() -> None:
    """K = 6832 is no multiple of the 128 bytes of a line (docs/facts/scaled.md#promoted-lines)."""
    assert shares_of_loads((816, 1920, 6832 // 2, 1)) == 4
    aligned, apart = (
        promoted.predictions((816, 1920, k // 2, 1), H200, [alone])[alone]
        for k in (6784, 6800)
        for alone in [replace(SQUARE, tile_m=128, tile_n=128, recipe=PROMOTED, swap_ab=False)]
    )
    assert apart > 1.1 * aligned


def test_any_config_that_takes_sums_without_factors_is_predicted() -> None:
    """Those that no candidate is like, as a choice of this machine may be."""
    many = replace(SQUARE, tile_m=64, tile_n=64, num_stages=8, warpgroups=1, epi_n=32, split_k=8)
    many = replace(many, recipe=PROMOTED)
    assert promoted.predictions((64, 512, 4096, 1), H200, [many])[many] > 0


def test_clusters_of_four_are_all_there_at_one_time() -> None:
    """Where they are not, those that are left take a round of their own."""
    for m, n, k in ((1104, 7232, 11264), (1808, 4096, 4096), (600, 2656, 7168), (240, 736, 18816)):
        problem = Fp8Problem(m, n, k)
        for tiles in cost_model.candidates(problem, H200.num_sms, recipe=PROMOTED):
            group = cost_model.group_of(tiles)
            ctas = cost_model.Counts.of(tiles, problem).ctas(tiles)
            assert group <= 2 or ctas <= cost_model.at_once(tiles, H200.num_sms) < H200.num_sms


@pytest.mark.slow
@pytest.mark.parametrize("split_k", [1, 2])
def test_many_rows_are_exact_as_columns(split_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = Fp8Config(tile_m=64, tile_n=96, num_stages=4, warpgroups=1, epi_n=32, epi_stages=1,
                      recipe=PROMOTED, swap_ab=True, split_k=split_k)  # fmt: skip
    monkeypatch.setattr(choices, "preferred", lambda calls: tiles)
    forget()
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randint(-4, 5, (n, 1040), generator=generator).float() for n in (272, 136))
    low = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).mT
    with ops.simulated(order="random", seed=split_k):
        out = cutex.matmul(*low, use_fast_accum=False)
    assert torch.equal(out, (a @ b.mT).bfloat16())
    forget()
