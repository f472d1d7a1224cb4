"""The strength of memory accesses and fences (PTX ISA 8.5, 8.6, 8.8), as their opcodes give it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_FENCE = re.compile(r"(fence(?!\.proxy)|membar)\.[\w.]*(gpu|gl|sys)")
_NEAR_FENCE = re.compile(r"(fence(?!\.proxy)|membar)\.[\w.]*(cta|cluster)\b")
_NARROW = re.compile(r"\.(cta|cluster)(?!::)\b")
_OWN = re.compile(r"\.cta(?!::)\b")


_OWN_SHARED = re.compile(r"\.shared(?!::cluster)")
_BY_SPACE = frozenset(("ld", "st", "atom", "red", "mbarrier", "ldmatrix", "stmatrix"))


@lru_cache(maxsize=1024)
def is_own_shared(op: str) -> bool:
    """Whether an opcode accesses shared memory of its own CTA only (5.1.7)."""
    return op.partition(".")[0] in _BY_SPACE and _OWN_SHARED.search(op) is not None


def scope_of(op: str) -> str:
    """The scope that an opcode names: that of a "cta", a "cluster" or the "gpu" (or the system)."""
    found = _NARROW.search(op)
    return found[1] if found else "gpu"


class Strength(NamedTuple):
    """The role of an access in the order of threads; ``near``: of those of its cluster only,
    ``own``: of its CTA only.
    """

    strong: bool  # another strong one does not race with it (8.7.1)
    atomic: bool
    acquires: bool
    releases: bool
    near: bool = False
    own: bool = False

    @property
    def far(self) -> bool:
        """Whether it is strong for other clusters, too."""
        return self.strong and not self.near


WEAK = Strength(False, False, False, False)


@lru_cache(maxsize=1024)
def strength(op: str) -> Strength:
    """The strength of an opcode; one with the scope of a CTA or a cluster, or on shared memory,
    orders nothing across clusters.
    """
    parts = op.split(".")
    if parts[0] not in ("ld", "st", "atom", "red"):
        return WEAK
    atomic = parts[0] in ("atom", "red")
    both = "acq_rel" in parts
    acquires, releases = both or "acquire" in parts, both or "release" in parts
    strong = atomic or acquires or releases or not {"relaxed", "volatile", "mmio"}.isdisjoint(parts)
    near = _NARROW.search(op) is not None or any(part.startswith("shared") for part in parts)
    own = _OWN.search(op) is not None
    return Strength(strong, atomic, acquires, releases, near, own) if strong else WEAK


def is_fence(op: str) -> bool:
    """Whether an opcode is a fence with the scope of the GPU or the system."""
    return _FENCE.match(op) is not None


def is_near_fence(op: str) -> bool:
    """Whether it is a fence with the scope of a CTA or a cluster."""
    return _NEAR_FENCE.match(op) is not None
