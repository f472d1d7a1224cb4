"""Every dispatcher hands out every tile once, and the same sequence to all roles of a CTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Operand, compile
from cutex.device.pipeline import publish_barriers
from cutex.schedulers.counter import CounterDispatch
from cutex.schedulers.dispatch import Dispatcher
from cutex.schedulers.order import TileCounts
from cutex.schedulers.persistent import StaticPersistent
from cutex.schedulers.raster import Raster, RasterOrder
from cutex.sim import simulate

ROLES = 3  # warps that follow the sequence


@dataclass(frozen=True)
class WalkConfig:
    dispatch: str
    num_ctas: int
    batched: bool = False


class Walks:
    """Each role counts in mSeen (L, M, N, ROLE) the tiles that it gets, and adds to mSum (ROLE,
    CTA) the position of each tile in its sequence times the tile's number."""

    arch = "sm_90a"
    dtypes = ("fp32",)

    def __init__(self, config: WalkConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return f"sm90_walk_{self.config.dispatch}"

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        plain: dict[str, Any] = {"contiguous": None, "aligned": False, "whole": False}
        return (
            Operand("mSeen", ("l", "m", "n", "roles"), "fp32", **plain),
            Operand("mSum", ("r", "c"), "fp32", **plain),
            Operand("counter", ("one",), "fp32", **plain),
        )

    @cute.jit
    def __call__(self, mSeen: cute.Tensor, mSum: cute.Tensor, counter: cute.Tensor, stream) -> None:
        self.kernel(mSeen, mSum, counter).launch(
            grid=(1, 1, self.config.num_ctas)
            if self.config.dispatch == "static"
            else (self.config.num_ctas, 1, 1),
            block=(32 * (ROLES + 1), 1, 1),
            stream=stream,
        )

    def dispatcher(self, smem: SmemAllocator, mC: Any, counter: cute.Tensor) -> Dispatcher:
        raster, counts = Raster(3), TileCounts.of(mC, (1, 1))
        if self.config.dispatch == "static":
            return StaticPersistent(raster, (1, 1), self.config.num_ctas).walk(counts)
        order = RasterOrder.of(raster, counts)
        count = cute.make_tensor(
            cute.recast_ptr(counter.iterator, dtype=Int32), cute.make_layout(1)
        )
        return CounterDispatch.allocate(smem, order, count, readers=ROLES)

    @cute.kernel
    def kernel(self, mSeen: cute.Tensor, mSum: cute.Tensor, counter: cute.Tensor) -> None:
        smem = SmemAllocator()
        batch, m, n, _ = mSeen.shape
        dispatch = self.dispatcher(smem, cute.make_identity_tensor((m, n, batch)), counter)
        publish_barriers(dispatch.barriers)
        warp = cute.arch.warp_idx()
        if warp == ROLES:
            dispatch.schedule()
        else:
            self.follow(dispatch, mSeen, mSum, warp)

    @cute.jit
    def follow(
        self,
        dispatch: cutlass.Constexpr[Dispatcher],
        mSeen: cute.Tensor,
        mSum: cute.Tensor,
        role: Int32,
    ) -> None:
        x, _, z = cute.arch.block_idx()
        place = Int32(1)
        ticket = dispatch.first()
        while ticket.valid:
            tile = dispatch.tile(ticket)
            if cute.arch.lane_idx() == 0:
                mSeen[tile.batch, tile.m, tile.n, role] += 1.0
                mSum[role, x + z] += cutlass.Float32(place * (ticket.index + 1))
            place += 1
            ticket = dispatch.next(ticket)


SIZES = {"one each": (1, 2, 2), "several": (2, 5, 4), "many": (3, 7, 5)}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("order", ["fifo", "eager", "starved", "random"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("dispatch", ["static", "counter"])
def test_every_tile_comes_once_and_all_roles_agree(
    dispatch: str, sizes: tuple[int, int, int], order: str
) -> None:
    num_ctas = 4
    compiled = compile(Walks(WalkConfig(dispatch, num_ctas)), "fp32", "sm_90a")
    counter = torch.zeros(1)
    for seed in range(2):  # the second launch finds the counter as the first did
        seen = torch.zeros(*sizes, ROLES)
        sums = torch.zeros(ROLES, num_ctas)
        report = simulate(compiled, seen, sums, counter, order=order, seed=seed)
        assert not report.findings, "\n".join(map(str, report.findings))
        assert torch.equal(seen, torch.ones_like(seen))
        assert all(torch.equal(sums[0], sums[role]) for role in range(ROLES)), "one sequence"
        assert counter.view(torch.int32).item() == 0


@pytest.mark.slow
def test_a_counter_gives_more_tiles_to_a_cta_that_asks_sooner() -> None:
    compiled = compile(Walks(WalkConfig("counter", 4)), "fp32", "sm_90a")
    shares = set()
    for seed in range(4):
        seen, sums = torch.zeros(3, 7, 5, ROLES), torch.zeros(ROLES, 4)
        simulate(compiled, seen, sums, torch.zeros(1), order="random", seed=seed)
        shares.add(tuple(sums[0].tolist()))
    assert len(shares) > 1
