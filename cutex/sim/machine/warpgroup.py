"""The state of a warpgroup's wgmma: groups in flight and their accumulators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.machine.memory import POISON32
from cutex.sim.machine.operation import Agent, Engine, Operation
from cutex.sim.machine.registers import Registers
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.core import Core


@dataclass
class Accumulator:
    """The D registers of a warpgroup while wgmmas write them; warps load and release one by one."""

    registers: Registers
    values: np.ndarray  # (4 warps, 16 rows, N); int32 where kind is s32, else float32
    by: Instruction
    kind: str = "f32"
    # per warp: operations in flight, and whether its registers are loaded
    in_flight: list[int] = field(default_factory=lambda: [0] * 4)
    loaded: list[bool] = field(default_factory=lambda: [False] * 4)
    # and by further names of its registers, whose they are (see ptx/renames)
    names: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in range(4)])


@dataclass
class Group:
    in_flight: int = 0


@dataclass
class WarpState:
    open: Group = field(default_factory=Group)
    committed: list[Group] = field(default_factory=list)
    issued: int = 0
    commits: int = 0


class Descriptors(NamedTuple):
    """The operands on which the warps of a warpgroup must agree."""

    a: int | None  # None: A is in registers
    b: int
    keep: bool  # D is added to


@dataclass
class Rendezvous:
    """One wgmma of a warpgroup: it is issued when its four warps have arrived."""

    ins: Instruction
    descriptors: Descriptors
    acc: Accumulator
    groups: list[tuple[int, Group]] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)  # the warps' agents, in the order of `groups`
    # A in registers: warp of the group -> (16, K)
    fragments: dict[int, np.ndarray] = field(default_factory=dict)


@lru_cache(maxsize=64)
def fragment_coordinates(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The row (of 16) and the column of register i in lane t of an m64nNk16 D fragment: two (N/2,
    32) arrays (9.7.15.5.2).
    """
    i, t = np.arange(n // 2)[:, None], np.arange(32)[None, :]
    return t // 4 + 8 * (i // 2 % 2) + 0 * i, 8 * (i // 4) + 2 * (t % 4) + i % 2


def _unpack(words: np.ndarray, kind: str) -> np.ndarray:
    """(registers, warps, 32) words as (values, warps, 32): two values per register for f16."""
    if kind == "f16":
        halves = np.ascontiguousarray(words).view(np.float16).reshape(*words.shape, 2)
        return np.moveaxis(halves, 3, 1).reshape(-1, *words.shape[1:]).astype(np.float32)
    return words.view(np.int32 if kind == "s32" else np.float32)


def _pack(values: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of `_unpack`."""
    if kind == "f16":
        halves = values.astype(np.float16).reshape(-1, 2, *values.shape[1:])
        return np.ascontiguousarray(np.moveaxis(halves, 1, 3)).view(np.uint32)[..., 0]
    return values.view(np.uint32)


class WarpgroupMma:
    """wgmma groups and accumulators of the resident warps."""

    def __init__(self, machine: Core) -> None:
        self.m = machine
        self.clear()

    def clear(self) -> None:
        self.warps: dict[int, WarpState] = defaultdict(WarpState)
        self.accumulators: dict[tuple[int, int], list[Accumulator]] = {}  # by (cta, warpgroup)
        self.meeting: dict[tuple[int, int, int], Rendezvous] = {}  # by (cta, warpgroup, number)

    def state(self, warp: int) -> WarpState:
        return self.warps[warp]

    def warp(self, key: tuple[int, int], inside: int) -> int:
        """The number of warp ``inside`` (0..3) of a warpgroup."""
        return (key[1] * 4 + inside) * self.m.grid.num_ctas + key[0]

    def take(
        self,
        key: tuple[int, int],
        inside: list[int],
        registers: Registers,
        n: int,
        kind: str,
        ins: Instruction,
        keep: bool,
    ) -> Accumulator:
        """The accumulator in these registers: the one in flight, or a new one, loaded for the warps
        ``inside``. ``keep``: whether it is added to.

        While it is in flight, the registers hold poison: an instruction that reads them before
        wgmma.wait_group reads NaN.
        """
        accumulators = self.accumulators.setdefault(key, [])
        acc = None
        for other in accumulators:
            if other.registers is registers:
                acc = other
            elif not other.registers.members.isdisjoint(registers.members):
                who = self.m.grid.name_warp(self.warp(key, inside[0]))
                self.m.findings.add(
                    "race",
                    f"wgmma of {who} accumulates in registers that {other.by.where()} still writes",
                    ins,
                )
        if acc is None:
            dtype = np.int32 if kind == "s32" else np.float32
            acc = Accumulator(registers, np.empty((4, 16, n), dtype), ins, kind)
            accumulators.append(acc)
        fresh = [i for i in inside if not acc.loaded[i]]
        if fresh:
            bank, row, column = self.m.registers[32], *fragment_coordinates(n)
            where = np.ix_(registers.indices, [self.warp(key, i) for i in fresh])
            words = bank[where]  # (N/2, warps, 32)
            if keep and (words[[0, -1]] == POISON32).all():
                self.m.findings.add(
                    "uninitialised",
                    f"wgmma of {self.m.grid.name_warp(self.warp(key, fresh[0]))} adds to registers "
                    "that nothing has written",
                    ins,
                )
            fragments = _unpack(words, kind)
            for j, i in enumerate(fresh):
                acc.values[i][row, column] = fragments[:, j]
                acc.loaded[i] = True
            bank[where] = POISON32
        for i in inside:
            acc.in_flight[i] += 1
        return acc

    def uncommitted(self, op: Operation) -> bool:
        """Whether a wgmma is in no group yet."""
        return op.engine is Engine.WGMMA and any(
            number > self.warps[warp].commits for warp, number in op.agents
        )

    def renamed(self, warps: np.ndarray, to: int, of: int) -> None:
        """A mov of register ``of``, which may be in flight, to ``to``."""
        for warp in warps.tolist():
            inside, cta = divmod(warp, self.m.grid.num_ctas)
            for acc in self.accumulators.get((cta, inside // 4), ()):
                names = acc.names[inside % 4]
                if acc.loaded[inside % 4] and (of in names or of in acc.registers.members):
                    names[to] = names.get(of, of)

    def _rename(self, acc: Accumulator, inside: int, warp: int) -> Callable[[np.ndarray], None]:
        """A function that gives the other names of the registers their values, where nothing has
        written them since, once those have them.
        """
        bank, place = self.m.registers[32], acc.registers.indices.index
        names = [(to, place(of)) for to, of in acc.names[inside].items()]
        here = [bank[to, warp] == POISON32 for to, _ in names]
        acc.names[inside] = {}

        def write(packed: np.ndarray) -> None:
            for (to, row), lanes in zip(names, here, strict=True):
                bank[to, warp] = np.where(lanes, packed[row], bank[to, warp])

        return write

    def release(self, key: tuple[int, int], acc: Accumulator) -> None:
        """One operation of all four warps is complete: the last one writes the registers back."""
        acc.in_flight = [count - 1 for count in acc.in_flight]
        if min(acc.in_flight):
            return
        done = [i for i in range(4) if acc.loaded[i] and not acc.in_flight[i]]
        if not done:
            return
        row, column = fragment_coordinates(acc.values.shape[2])
        fragments = np.stack([acc.values[i][row, column] for i in done], 1)
        warps = [self.warp(key, i) for i in done]
        packed = _pack(fragments, acc.kind)  # (registers, warps, 32)
        names = [(j, i) for j, i in enumerate(done) if acc.names[i]]
        renames = [(j, self._rename(acc, i, warps[j])) for j, i in names]
        self.m.registers[32][np.ix_(acc.registers.indices, warps)] = packed
        for j, write in renames:
            write(packed[:, j])
        acc.loaded = [loaded and i not in done for i, loaded in enumerate(acc.loaded)]
        if not any(acc.loaded):
            self.accumulators[key].remove(acc)
