"""The orders of events: one object makes every choice that the hardware leaves open.

It chooses the warps that run next and for how long, the operation in flight that completes and
when, the lane that ``elect.sync`` returns, the clusters that start first, and whether a cluster
launch request is refused. Each order of `cutex.orders` is a class here.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.orders import ORDERS

if TYPE_CHECKING:
    from cutex.sim.machine.flight import Flight
    from cutex.sim.machine.grid import Grid
    from cutex.sim.machine.operation import Operation

_TURN = 4096  # instructions that a batch runs before warps at higher positions get their turn


class Turn(NamedTuple):
    """Warps that run next, at one place of the program, for ``limit`` instructions at most."""

    place: int
    warps: np.ndarray
    limit: int


class Policy:
    """The order "fifo", and the base of the others.

    Warps run until they wait, the one at the lowest program position first, so that warps at the
    same position run as one batch; operations in flight complete only when no warp can run, the
    oldest of each cluster, bulk stores last. That is late and one by one, so a warp that does not
    wait for an operation, or waits for another one, finds it still in flight.
    """

    divides = True  # clusters run the same whether simulated together or in separate processes
    gathers = True  # a batch stops where other warps wait, to continue with them
    completes_at_once = False  # operations complete before any warp continues

    def __init__(self, seed: int) -> None:
        self.seed = seed

    elected = 0  # the lane that elect.sync prefers: any, always the same (PTX ISA 9.7.14.14)

    def start_order(self, clusters: list[int]) -> list[int]:
        """The order in which the grid's clusters start."""
        return clusters

    def late(self, grid: Grid) -> np.ndarray:
        """The warps that run only when nothing else can, (warps,) bool."""
        return np.zeros(grid.num_warps, bool)

    def turn(self, warps: np.ndarray, places: np.ndarray) -> Turn:
        """The warps, out of ``warps`` at program positions ``places``, that run next."""
        place = int(places.min())
        return Turn(place, warps[places == place], _TURN)

    def early(self, flight: Flight) -> list[Operation]:
        """The operations that complete now, although warps could run."""
        return []

    def due(self, flight: Flight) -> list[Operation]:
        """The operations that complete because no warp can run: one at a time, so that a warp that
        waits for one but needs another finds that one in flight.
        """
        return flight.oldest(stores=False) or flight.oldest(stores=True)

    def refuses_launch(self) -> bool:
        """Whether a cluster launch request is refused although clusters are left."""
        return False


class Eager(Policy):
    """The order of fifo, but an operation completes as soon as it may, before any warp
    continues."""

    completes_at_once = True


class Starved(Policy):
    """The order of fifo, but one warp of each CTA, picked by the seed, runs only when nothing else
    can.
    """

    def late(self, grid: Grid) -> np.ndarray:
        return grid.warp_in_cta == self.seed % grid.warps_per_cta


class PeerLate(Policy):
    """The order of fifo, but all CTAs of a cluster except one, picked by the seed, run only when
    nothing else can.
    """

    def late(self, grid: Grid) -> np.ndarray:
        rank = grid.cta_rank[grid.warp_cta]
        if grid.cluster_size == 1:
            return super().late(grid)
        return rank != self.seed % grid.cluster_size


class Elected(Policy):
    """The order of fifo, but elect.sync returns another lane than the first, picked by the seed.

    It is an order of its own, for hardware returns the first, and some public kernels rely on it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.elected = 1 + seed % 31


class Random(Policy):
    """The seed decides which warps run, for how long, and which operation completes when."""

    divides, gathers = False, False
    COMPLETE = 0.3  # share of turns in which an operation completes
    SPLIT = 0.5  # share of batches of which only some warps run
    REFUSE = 0.1  # share of cluster launch requests that are refused

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.random = random.Random(seed)

    def start_order(self, clusters: list[int]) -> list[int]:
        self.random.shuffle(clusters)
        return clusters

    def turn(self, warps: np.ndarray, places: np.ndarray) -> Turn:
        place = int(self.random.choice(places.tolist()))
        batch, limit = warps[places == place], self.random.randint(1, 200)
        if len(batch) > 1 and self.random.random() < self.SPLIT:
            count = self.random.randint(1, len(batch))
            batch = np.sort(np.array(self.random.sample(batch.tolist(), count)))
        return Turn(place, batch, limit)

    def early(self, flight: Flight) -> list[Operation]:
        return self.due(flight) if self.random.random() < self.COMPLETE else []

    def due(self, flight: Flight) -> list[Operation]:
        return [self.random.choice(flight.heads())]

    def refuses_launch(self) -> bool:
        return self.random.random() < self.REFUSE


_POLICIES = {
    "fifo": Policy, "eager": Eager, "starved": Starved, "peer-late": PeerLate,
    "elected": Elected, "random": Random,
}  # fmt: skip


def policy(order: str, seed: int) -> Policy:
    """The policy of ``order``. Raises ValueError for an order that is not in `cutex.orders`."""
    if order not in ORDERS:
        raise ValueError(f"order {order!r}: takes one of {', '.join(ORDERS)}")
    return _POLICIES[order](seed)
