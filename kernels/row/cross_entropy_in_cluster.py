"""Cross-entropy of few rows by one cluster, whose CTAs send each other the sums of their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, cute

from cutex.device.row.columns import Columns
from cutex.device.row.reduction import add
from cutex.device.row.tile import RowTile
from cutex.device.stream_order import wait_for_kernel_before
from cutex.kernels.row.cross_entropy import (
    CLUSTER,
    CrossEntropy,
    CrossEntropyConfig,
    load_now,
)
from cutex.kernels.row.kernel import ThisRow, launch_of, meet, reductions, row_of
from cutex.kernels.row.softmax import combined


@dataclass(frozen=True)
class LossInClusterConfig(CrossEntropyConfig):
    """A sum or mean of losses. The tile has rows of a CTA; ctas: those of the cluster, which have
    all rows at one time."""

    ctas: int = 1

    @property
    def together(self) -> RowTile:
        """All threads, as those of one row."""
        return RowTile(1, self.tile.num_threads, self.ctas)

    def why_not(self) -> str | None:
        if not self.reduced or self.adds != CLUSTER or self.tile.ctas > 1 or self.walks:
            return f"ctas={self.ctas}: adds up losses of rows that a CTA has each"
        return self.tile.why_not() or self.together.why_not()


class LossInCluster(CrossEntropy):
    """The sum or mean of few losses: no word of global memory says who is the last."""

    title = "cross_entropy_in_cluster"
    archs = ("sm_90a", "sm_100a", "sm_120a")

    def last_of(self, totals: list) -> tuple | None:
        return (*totals,)

    def how(self, mX: cute.Tensor, stream: Any) -> dict[str, Any]:
        ctas = self.config.ctas
        cluster = (ctas, 1, 1) if ctas > 1 else None
        return launch_of(self.tile, mX, stream) | {"grid": (ctas, 1, 1), "cluster": cluster}

    @cute.kernel
    def by_rows(self, mX, mTarget, mLse, mLosses, totals, s, z, ignored) -> None:
        c, tile = self.config, self.config.tile
        (of_row,) = reductions(tile, 2 + c.smoothed)
        (of_all,) = reductions(c.together, 2, later=True, by_cta=True)
        this = ThisRow.of(tile, mX)
        columns = Columns.of(tile, this(mX))
        wait_for_kernel_before()
        speaks = this.exists & columns.is_first_of_row()
        target, label = mTarget.element_type(0), cute.make_rmem_tensor(1, mX.element_type)
        label.fill(0)
        if speaks:
            target = load_now(mTarget.iterator + this.row)
        rX = row_of(mX, this, columns, -Float32.inf)  # (V, NumV)
        self.read_label(this(mX), columns, speaks, target, label)
        found = combined(of_row, self.of_part(columns, rX))
        loss, count = Float32(0), Float32(0)
        if speaks:
            to, options = (mLse, mLosses), (s, z, ignored)
            loss = self.store_loss(found, columns, target, label, to, this.row, options)
            count = cutlass.select_(target != ignored, Float32(1), Float32(0))
        meet(c.together)
        loss, count = of_all((loss, count), add)
        if (cute.arch.thread_idx()[0] == 0) & (cute.arch.block_idx()[0] == 0):
            self.store_total(loss, count, *totals)
