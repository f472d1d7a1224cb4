"""The program positions of the lanes of each warp, and which of them run.

Lanes that diverge at a branch run separately; those ahead wait at a post-dominator, where every
path of the others passes, as compilers make hardware do, so that a warp reconverges after an if, a
loop or an elected lane's work. Only when nothing else in the machine can run do they continue
alone, up to an instruction that needs the whole warp: hardware guarantees progress to each lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.ptx.flow import flow_of

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch
    from cutex.sim.ptx.program import Program

RUNNING, BLOCKED, YIELDED, DONE = 0, 1, 2, 3  # states of a warp


class Divergence:
    """Program positions and states of all resident warps, and of their lanes while they are
    diverged.

    A warp is diverged while its live lanes are at different places, or some of them sleep.
    ``pc`` is the place of a warp's lanes that run next.
    """

    def __init__(self, program: Program) -> None:
        self.flow, self.end = flow_of(program), len(program.code) + 1

    def clear(self, live: np.ndarray) -> None:
        """Put all lanes of ``live`` (warps, 32) at the start of the program."""
        warps = len(live)
        self.live = live
        self.state = np.where(live.any(1), RUNNING, DONE).astype(np.uint8)
        self.pc = np.zeros(warps, np.int64)
        self.diverged = np.zeros(warps, bool)
        self.lane_pc = np.zeros((warps, 32), np.int64)
        self.asleep = np.zeros((warps, 32), bool)
        self.turn = np.zeros((warps, 32), np.int64)  # how often a lane has yielded
        self.alone = np.zeros(warps, bool)  # lanes continue without those that they would wait for
        self.held = np.zeros((warps, 32), bool)  # alone, stopped at an instruction of whole warps

    def running(self, idx: np.ndarray, place: int) -> np.ndarray | None:
        """The active lanes of warps that are at ``place``; None for all lanes of full warps."""
        live, diverged = self.live[idx], self.diverged[idx]
        if not diverged.any() and live.all():
            return None
        here = (self.lane_pc[idx] == place) & ~self.asleep[idx] & ~self.held[idx]
        return live & (here | ~diverged[:, None])

    def meeting_places(
        self, idx: np.ndarray, mask: np.ndarray, place: int
    ) -> tuple[int, frozenset[int]]:
        """The places at which a batch may have to stop: the next higher one with lanes of its
        warps, and all at which it would have to wait for them.
        """
        others = self.live[idx] & self.diverged[idx][:, None] & ~mask
        if not others.any():
            return self.end, frozenset()
        above = self.lane_pc[idx][others]
        above = above[above > place]
        stop = int(above.min()) if len(above) else self.end
        others &= ~self.held[idx] & ~self.alone[idx][:, None]
        behind = set(self.lane_pc[idx][others].tolist()) - {place}
        return stop, frozenset().union(*(self.flow.beyond(pc) for pc in behind))

    # -- moving ------------------------------------------------------------------------------------

    def settle(self, batch: Batch, place: np.ndarray) -> None:
        """Put the batch's lanes at ``place`` (n,)."""
        if batch.mask is None:
            self.pc[batch.idx] = place
            return
        diverged = self.diverged[batch.idx]
        self.pc[batch.idx[~diverged]] = place[~diverged]
        if diverged.any():
            idx = batch.idx[diverged]
            lanes = self.lane_pc[idx]
            lanes[batch.mask[diverged]] = np.repeat(place[diverged], batch.mask[diverged].sum(1))
            self.lane_pc[idx] = lanes
            self.choose(idx)

    def branch(
        self, batch: Batch, here: np.ndarray, taken: np.ndarray, pc: int, target: int
    ) -> None:
        """Split warps, or lanes of a warp, between a branch's target and the next instruction."""
        some, every = taken.any(1), (taken == here).all(1)
        split = some & ~every
        place = np.where(every, target, pc + 1)
        if not split.all():
            self.settle(batch.pick(~split), place[~split])
        idx = batch.idx[split]
        if len(idx):
            lanes = np.where(self.diverged[idx][:, None], self.lane_pc[idx], self.pc[idx][:, None])
            lanes[here[split]] = pc + 1
            lanes[taken[split]] = target
            self.lane_pc[idx] = lanes
            self.diverged[idx] = True
            self.choose(idx)

    def leave(self, batch: Batch, leaving: np.ndarray, pc: int) -> np.ndarray:
        """Let lanes return at ``pc``; return the warps without live lanes."""
        idx = batch.idx
        lanes = np.where(self.diverged[idx][:, None], self.lane_pc[idx], pc)
        lanes[batch.active() & ~leaving] = pc + 1
        self.lane_pc[idx] = lanes
        self.live[idx] &= ~leaving
        self.diverged[idx] = True
        gone = idx[~self.live[idx].any(1)]
        self.choose(idx)
        self.state[gone] = DONE
        return gone

    # -- sleeping ----------------------------------------------------------------------------------

    def sleep(self, warp: int, lanes: np.ndarray | None) -> None:
        """Let these lanes sleep until `wake`; None for all lanes of a warp that is not diverged."""
        if lanes is None:
            self.state[warp] = BLOCKED
        else:
            self.asleep[warp] |= lanes
            self.choose(np.array([warp]))

    def wake(self, warp: int, lanes: np.ndarray | None) -> None:
        if lanes is None:
            self.state[warp] = RUNNING
        else:
            self.asleep[warp] &= ~lanes
            self.choose(np.array([warp]))

    def give_way(self, batch: Batch) -> None:
        """Let spinning lanes yield to others; if there are none, until something happens."""
        self.state[batch.idx] = YIELDED
        diverged = self.diverged[batch.idx]
        for warp, mask in zip(batch.idx[diverged], batch.active()[diverged], strict=True):
            self.turn[warp, mask] += 1
            self._choose_one(int(warp))
            if not self._at(int(warp))[mask].any():
                self.state[warp] = RUNNING

    def go_on_alone(self) -> bool:
        """Let lanes run that wait only for lanes of their own warp; return False if there are
        none."""
        stuck = self.diverged & ~self.alone & ((self.state == BLOCKED) | (self.state == YIELDED))
        waiting = stuck & (self.live & ~self.asleep).any(1)
        idx = np.nonzero(waiting)[0]
        self.alone[idx] = True
        self.choose(idx)
        return bool(len(idx))

    def hold(self, batch: Batch) -> Batch | None:
        """Stop lanes that are alone before an instruction of whole warps; return the batch of the
        others.
        """
        if batch.mask is None:
            return batch
        partial = (self.live[batch.idx] & ~batch.mask).any(1) & self.alone[batch.idx]
        if not partial.any():
            return batch
        for warp, mask in zip(batch.idx[partial], batch.mask[partial], strict=True):
            self.held[warp] |= mask
        self.choose(batch.idx[partial])
        return None if partial.all() else batch.pick(~partial)

    # -- choosing ----------------------------------------------------------------------------------

    def choose(self, idx: np.ndarray) -> None:
        """Set ``pc``, ``diverged`` and ``state`` of warps whose lanes moved, slept or woke."""
        live = self.live[idx]
        lanes = self.lane_pc[idx]
        far = self.end
        low = np.where(live, lanes, far).min(1)
        high = np.where(live, lanes, -1).max(1)
        sleepy = (self.asleep[idx] & live).any(1)
        self.pc[idx] = low
        together = (low >= high) & ~sleepy
        whole = idx[together]
        self.diverged[whole] = self.alone[whole] = False
        self.held[whole] = False
        self.turn[whole] = 0
        self.state[idx] = RUNNING
        rest = idx[~together]
        if not len(rest):
            return
        self.diverged[rest] = True
        plain = ~(sleepy | self.alone[idx] | self.turn[idx].any(1))[~together]
        plain &= ((lanes == low[:, None]) | (lanes == high[:, None]) | ~live).all(1)[~together]
        pairs = np.stack([low[~together], high[~together]], 1)
        for a, b in {tuple(p) for p in pairs[plain].tolist()}:
            if a in self.flow.beyond(b):
                these = plain & (pairs == (a, b)).all(1)
                self.pc[rest[these]] = b
        for warp in rest[~plain].tolist():
            self._choose_one(warp)

    def _at(self, warp: int) -> np.ndarray:
        """The lanes, (32,), of a diverged warp that run next."""
        awake = self.live[warp] & ~self.asleep[warp] & ~self.held[warp]
        return awake & (self.lane_pc[warp] == self.pc[warp])

    def _choose_one(self, warp: int) -> None:
        live, lanes = self.live[warp], self.lane_pc[warp]
        ready = live & ~self.asleep[warp] & ~self.held[warp]
        places = set(lanes[ready].tolist())
        if not self.alone[warp]:
            others = set(lanes[live & ~self.held[warp]].tolist())
            places = {p for p in places if not any(p in self.flow.beyond(o) for o in others)}
        if not places:
            self.state[warp] = BLOCKED
            return
        turns = {p: int(self.turn[warp][ready & (lanes == p)].min()) for p in places}
        self.pc[warp] = min(places, key=lambda p: (turns[p], p))
