"""The state of a warpgroup's wgmma: groups in flight and their accumulators."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.machine.memory import POISON32
from cutex.sim.machine.operation import Agent
from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch
    from cutex.sim.machine.core import Core


class Registers:
    """32-bit registers of an operand, in fragment order; one object per tuple of indices."""

    __slots__ = ("array", "indices", "members")

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices, self.members = indices, frozenset(indices)
        self.array = np.array(indices, np.intp)

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(indices: tuple[int, ...]) -> Registers:
        return Registers(indices)


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


@dataclass
class Group:
    in_flight: int = 0


class Unwaited(NamedTuple):
    """Registers of wgmmas that their warp has not waited for."""

    group: int  # number of the last one's group
    by: Instruction


SEEN, CHANGED = 1, 2  # how a register was accessed


@dataclass
class WarpState:
    open: Group = field(default_factory=Group)
    committed: list[Group] = field(default_factory=list)
    issued: int = 0
    commits: int = 0
    results: dict[Registers, Unwaited] = field(default_factory=dict)  # accumulators
    sources: dict[Registers, Unwaited] = field(default_factory=dict)  # A


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
        self.fenced = np.zeros(self.m.grid.num_warps, bool)  # at least once
        shape = self.m.grid.num_warps, self.m.program.registers.get(32, 0)
        # accesses by other instructions since the last wgmma.fence: CHANGED, or SEEN (read, or mov)
        self.touched = np.zeros(shape, np.uint8)
        self.held = np.zeros(shape, bool)  # by wgmmas that the warp has not waited for
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
    ) -> Accumulator:
        """The accumulator in these registers: the one in flight, or a new one, loaded for the warps
        ``inside``.

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
            fragments = _unpack(bank[where], kind)  # (N/2, warps, 32)
            for j, i in enumerate(fresh):
                acc.values[i][row, column] = fragments[:, j]
                acc.loaded[i] = True
            bank[where] = POISON32
        for i in inside:
            acc.in_flight[i] += 1
        return acc

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
        self.m.registers[32][np.ix_(acc.registers.indices, warps)] = _pack(fragments, acc.kind)
        acc.loaded = [loaded and i not in done for i, loaded in enumerate(acc.loaded)]
        if not any(acc.loaded):
            self.accumulators[key].remove(acc)

    # -- accesses to registers ---------------------------------------------------------------------

    def take_hold(self, warps: np.ndarray, registers: np.ndarray) -> bool:
        """Mark the registers as used by wgmmas of the warps. Return whether all of them are ordered
        by a fence.
        """
        at = warps[:, None], registers
        self.held[at] = True
        return bool(self.fenced[warps].all()) and not self.touched[at].any()

    def waited(self, warp: int, group: int) -> None:
        """Record that the warp has waited for its first ``group`` groups."""
        state = self.state(warp)
        for unwaited in (state.results, state.sources):
            for registers in [r for r, u in unwaited.items() if u.group <= group]:
                del unwaited[registers]
        self.held[warp] = False
        for registers in (*state.results, *state.sources):
            self.held[warp, registers.array] = True

    def fence(self, warps: np.ndarray) -> None:
        """wgmma.fence of these warps."""
        self.touched[warps] = 0
        self.fenced[warps] = True

    def access(self, b: Batch, read: set[int], written: set[int], ins: Instruction) -> None:
        """Check an instruction other than a wgmma that reads and writes registers used by some
        wgmma.
        """
        at = b.idx[:, None], list(read | written)
        self.touched[at] = np.maximum(self.touched[at], SEEN)
        if written and ins.name != "mov":
            self.touched[b.idx[:, None], list(written)] = CHANGED
        for warp in b.idx[self.held[at].any(1)].tolist():
            state = self.state(warp)
            for registers, unwaited in state.results.items():
                if not registers.members.isdisjoint(read | written):
                    verb = "writes" if registers.members.isdisjoint(read) else "reads"
                    self.m.findings.add(
                        "race",
                        f"{self.m.grid.name_warp(warp)} {verb} an accumulator register before "
                        f"wgmma.wait_group; it is in flight since {unwaited.by.where()}",
                        ins,
                    )
            for registers, unwaited in state.sources.items():
                if not registers.members.isdisjoint(written):
                    self.m.findings.add(
                        "race",
                        f"{self.m.grid.name_warp(warp)} writes an A register that the wgmma issued "
                        f"at {unwaited.by.where()} may still read: no wgmma.wait_group says that "
                        "it is complete",
                        ins,
                    )

    def check_fence(self, warp: int, registers: np.ndarray, ins: Instruction) -> None:
        """Report wgmma registers whose ordinary accesses are not followed by a wgmma.fence
        (9.7.15.7.1).

        NOTE: a mov may be the compiler's, for a loop that carries an accumulator, and vanish in the
        end: such movs follow the fence of NVIDIA's persistent GEMM of Hopper. And its GEMM of fp8
        with two accumulators reads one, then has wgmma overwrite it, with no fence in between.
        """
        touched = self.touched[warp, registers]
        if self.fenced[warp] and not touched.any():
            return
        why = "its first wgmma comes without a wgmma.fence before it"
        if touched.any():
            why = (
                "its wgmma accesses a register that the warp has accessed since its last "
                "wgmma.fence"
            )
        seen = bool(self.fenced[warp]) and int(touched.max()) == SEEN
        self.m.findings.add("race", f"{self.m.grid.name_warp(warp)}: {why}", ins, advisory=seen)
