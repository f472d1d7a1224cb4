"""A fault in the handling of scale factors is found: as a wrong result, or by the simulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scaled_subjects import TILES, Case

from cutex.device.atoms import scale_factors
from cutex.device.atoms.scale_factors import BlockFactors, Factors, FactorTile
from cutex.device.atoms.umma import UmmaProduct
from cutex.kernels.gemm.scaled.sm100 import roles
from cutex.kernels.gemm.scaled.sm100.roles import StoreOverlapped
from cutex.kernels.gemm.scaled.sm100.signature import ScaledConfig
from cutex.sim import SimError


def stale_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """B's factors are not copied."""
    monkeypatch.setattr(BlockFactors, "copy", lambda self, slot, pair: self.a.copy(slot, pair))


def factors_of_slot_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes the factors of the first slot."""
    copy = Factors.copy
    monkeypatch.setattr(Factors, "copy", lambda self, slot, pair: copy(self, slot * 0, pair))


def first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every MMA takes the first factors of a word."""
    of_inst = Factors.of_inst
    monkeypatch.setattr(Factors, "of_inst", lambda self, dtype, n: of_inst(self, dtype, n // 4 * 4))


def next_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """MMAs beyond the first word of factors take it again."""
    of_inst = Factors.of_inst
    monkeypatch.setattr(Factors, "of_inst", lambda self, dtype, n: of_inst(self, dtype, n % 4))


def no_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile takes B's factors from the first row of a chunk on."""
    monkeypatch.setattr(BlockFactors, "of_columns", lambda self, first: self)


def wrong_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile loads the factors of a chunk before its own."""
    loads = FactorTile.loads

    def shifted(self, operand, sF, first, batch):
        return loads(self, operand, sF, first // 2, batch)

    monkeypatch.setattr(FactorTile, "loads", shifted)


def first_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a batch take the factors of its first entry."""
    loads = FactorTile.loads
    monkeypatch.setattr(
        FactorTile,
        "loads",
        lambda self, of, sF, first, batch: loads(self, of, sF, first, batch * 0),
    )


def uncounted_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full barrier does not expect the factors' bytes."""
    counted = ScaledConfig.loaded_bytes.fget
    assert counted is not None
    monkeypatch.setattr(
        ScaledConfig,
        "loaded_bytes",
        property(lambda self: counted(self) - self.tiles.ctas * self.tiles.factor_bytes),
    )


def padding_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step multiplies what is beyond K."""
    monkeypatch.setattr(
        UmmaProduct,
        "issue_first",
        lambda self, slot, accumulate, count: self.issue(slot, accumulate),
    )


def early_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next tile starts when one sub-tile too few has been read."""
    init = StoreOverlapped.__init__

    def fewer(self, tiles, unrolled, shared_parts):
        init(self, tiles, unrolled, shared_parts - 1)

    monkeypatch.setattr(StoreOverlapped, "__init__", fewer)


def plain_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first accumulator is read from its first columns on, and its last ones overwritten."""
    monkeypatch.setattr(StoreOverlapped, "part", lambda self, turn, take, num_parts: turn)


def one_accumulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MMA fills the first accumulator each time."""
    monkeypatch.setattr(roles.ScaledMma, "filled", lambda self, fill: fill.phase * 0)


def late_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's descriptor is that of the chunk behind it."""
    copy = scale_factors.copy_chunk
    monkeypatch.setattr(
        scale_factors, "copy_chunk", lambda tmem, source, pair: copy(tmem, source + 32, pair)
    )


TWO_STEPS = Case("nvfp4", TILES["192 columns"], (256, 400, 1024), seed=1)
MXFP8 = Case("mxfp8", TILES["two accumulators"], (256, 256, 288), seed=2)
SHARED = Case("nvfp4", TILES["shared columns"], (256, 1280, 256), seed=3)
MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Case]] = [
    (stale_factors, MXFP8),
    (factors_of_slot_0, MXFP8),
    (first_byte, MXFP8),
    (next_word, TWO_STEPS),
    (no_shift, TWO_STEPS),
    (wrong_chunk, TWO_STEPS),
    (first_entry, Case("mxfp8", TILES["two accumulators"], (64, 64, 64), batch=2)),
    (uncounted_bytes, MXFP8),
    (padding_multiplied, MXFP8),
    (early_release, SHARED),
    (plain_order, SHARED),
    (one_accumulator, SHARED),
    (late_copy, TWO_STEPS),
]


@pytest.mark.sweep(15)
@pytest.mark.parametrize(
    ("mutant", "case"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS]
)
def test_a_fault_is_found(mutant, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    kernel = case.compiled(cache=False)
    monkeypatch.undo()
    try:
        wrong = case.run(kernel, order="random", seed=3)
    except SimError:
        return
    assert wrong is not None, f"{mutant.__doc__} Nobody noticed."
