"""The orders of events: one object decides whatever hardware leaves open.

Which warps run next and for how long, which operation in flight completes and when, which lane
``elect.sync`` returns, which clusters start first, and whether a cluster launch request is refused.
Each order of `cutex.orders` is a class here.
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

_TURN = 4096  # instructions a batch may run before others at higher positions get their turn


class Turn(NamedTuple):
    """Warps that run next, at one place of the program, for ``limit`` instructions at most."""

    place: int
    warps: np.ndarray
    limit: int


class Policy:
    """The order "fifo", and what the others change.

    Warps run until they wait, the one at the lowest program position first, so that warps at the
    same place run as one batch; operations in flight complete only when no warp can run, the oldest
    of each cluster, bulk stores last. That is late and one by one, so whoever does not wait for an
    operation, or waits for another, meets it still in flight.
    """

    divides = True  # clusters that run apart run as they do together, but for the order of both
    gathers = True  # a batch stops where other warps stand, to run on with them
    completes_at_once = False  # operations complete before any warp runs on

    def __init__(self, seed: int) -> None:
        self.seed = seed

    elected = 0  # the lane that elect.sync prefers: any, always the same (PTX ISA 9.7.14.14)

    def start_order(self, clusters: list[int]) -> list[int]:
        """The order in which the grid's clusters start."""
        return clusters

    def late(self, grid: Grid) -> np.ndarray:
        """(warps,) those that run only when nothing else can."""
        return np.zeros(grid.num_warps, bool)

    def turn(self, warps: np.ndarray, places: np.ndarray) -> Turn:
        """Of ``warps``, which stand at ``places``: those that run next."""
        place = int(places.min())
        return Turn(place, warps[places == place], _TURN)

    def early(self, flight: Flight) -> list[Operation]:
        """Operations that complete now, although warps might run."""
        return []

    def due(self, flight: Flight) -> list[Operation]:
        """Operations that complete as no warp can run: whoever waits for one but needs another
        meets that one in flight.
        """
        return flight.oldest(stores=False) or flight.oldest(stores=True)

    def refuses_launch(self) -> bool:
        """Whether a cluster launch request is refused although clusters are left."""
        return False


class Eager(Policy):
    """As fifo, but an operation completes as soon as it may, before any warp runs on."""

    completes_at_once = True


class Starved(Policy):
    """As fifo, but one warp of each CTA, which the seed picks, runs only when nothing else can."""

    def late(self, grid: Grid) -> np.ndarray:
        return grid.warp_in_cta == self.seed % grid.warps_per_cta


class PeerLate(Policy):
    """As fifo, but all CTAs of a cluster except one, which the seed picks, run only when nothing
    else can.
    """

    def late(self, grid: Grid) -> np.ndarray:
        rank = grid.cta_rank[grid.warp_cta]
        if grid.cluster_size == 1:
            return super().late(grid)
        return rank != self.seed % grid.cluster_size


class Elected(Policy):
    """As fifo, but elect.sync returns another lane than the first, which the seed picks.

    An order of its own: hardware returns the first, and some public kernels rely on it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.elected = 1 + seed % 31


class Random(Policy):
    """A seed decides which warps run, for how long, and which operation completes when."""

    divides, gathers = False, False
    COMPLETE = 0.3  # of turns, in which an operation completes
    SPLIT = 0.5  # of batches, of which only some warps run
    REFUSE = 0.1  # of cluster launch requests

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
    """Raises ValueError for an order that `cutex.orders` does not name."""
    if order not in ORDERS:
        raise ValueError(f"order {order!r}: takes one of {', '.join(ORDERS)}")
    return _POLICIES[order](seed)
