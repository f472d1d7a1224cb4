"""Tensor maps that one thread changes and another uses: the order of changes, fences and copies."""

from __future__ import annotations

import re

import numpy as np
import pytest
from barriers import INIT, wait
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned, encode

from cutex.sim import Hazards

RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%map], 128;"
TO_B, TO_A = (
    f"tensormap.replace.tile.global_address.global.b1024.b64 [%map], {to};" for to in ("%b", "%a")
)
# %p0 is the first thread of a CTA, %p1 that of its second warp; `here` is a word of the box
FIRST = INIT.replace("COUNT", "1").replace("setp.eq.u32 %p0, %i", "setp.eq.u32 %p0, %r41")
HEAD = f"""mov.u32 %r41, %tid.x; {FIRST}
    .reg .b32 here; mov.u32 %r20, smem; add.u32 %r20, %r20, 128; shl.b32 here, %lane, 2;
    add.u32 here, here, %r20; setp.eq.u32 %p1, %r41, 32; setp.eq.u32 %p2, %cta, 0; mov.u32 %r5, 1;
"""
USE = """@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    @%p0 cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
         [%r20], [%map, {0}], [bar];
"""
STORE = """st.shared.b32 [here], 0; fence.proxy.async; bar.sync 0;
    @%p0 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%map, {0}], [%r20];
    @%p0 cp.async.bulk.commit_group;
"""
WAIT = "cp.async.bulk.wait_group"
# the first CTA changes the map and sets a flag, for which the second one waits
FLAG = """@!%p2 bra SECOND; CHANGE bra DONE;
    SECOND: @!%p0 bra JOIN; SPIN: ld.acquire.gpu.global.u32 %r6, [%flag];
    setp.ne.u32 %p6, %r6, 1; @%p6 bra SPIN; BETWEEN
""" + USE + "JOIN:" + wait("bar", 0, "W") + "DONE:"  # fmt: skip
SET = "@%p0 st.release.gpu.global.u32 [%flag], %r5;"


def by(thread: str, *what: str) -> str:
    return " ".join(f"@%{thread} {one}" for one in what)


def told(text: str, ctas: int = 1) -> str:
    """The finding, an advisory after "advisory: ", or nothing."""
    a, b = (aligned(np.arange(32, dtype=np.uint32) + at) for at in (0, 1000))
    raw = encode(a.ctypes.data, "u32", [32], [], [32])
    maps = {name: aligned(np.frombuffer(raw, np.uint8)) for name in ("map", "other")}
    arrays = {**maps, "a": a, "b": b, "flag": np.zeros(1, np.uint32)}
    try:
        report = simulate_ptx(HEAD + text, arrays, Shape(grid=ctas, block=64, smem=2048))
    except Hazards as found:
        return str(found)
    return "".join(f"advisory: {one}" for one in report.advisories)


def ends(parity: int = 0, name: str = "W") -> str:
    return wait("bar", parity, name)


CHANGED = by("p1", TO_B, RELEASE)
AGAIN = by("p0", TO_B, RELEASE, ACQUIRE) + USE + ends(0, "V") + by("p0", TO_A)
NO_ACQUIRE, RACE, READS = "generic.acquire of its CTA in between", "race: ", "which the TMA "
LET_GO = "advisory: advisory, proxy: .*generic.release of the thread that did in between"
FAULTS = [  # the fault, what is told, and its right twin
    (CHANGED + by("p0", ACQUIRE) + USE, RACE, CHANGED + "bar.sync 0;" + by("p0", ACQUIRE) + USE),
    (
        CHANGED + by("p0", ACQUIRE) + "bar.sync 0;" + USE, NO_ACQUIRE,
        CHANGED + by("p1", ACQUIRE) + "bar.sync 0;" + USE,
    ),
    (
        CHANGED + "bar.sync 0;" + by("p0", ACQUIRE.replace("map]", "other]")) + USE, NO_ACQUIRE,
        CHANGED + "bar.sync 0;" + by("p0", ACQUIRE) + USE,
    ),
    (
        CHANGED + "bar.sync 0; setp.eq.u32 %p3, %r41, 33;" + by("p3", ACQUIRE) + USE, NO_ACQUIRE,
        CHANGED + "bar.sync 0;" + by("p1", ACQUIRE) + "bar.sync 0;" + USE,
    ),
    (
        by("p1", TO_B) + by("p0", RELEASE) + "bar.sync 0;" + by("p0", ACQUIRE) + USE, LET_GO,
        by("p1", TO_B) + "bar.sync 0;" + by("p0", RELEASE, ACQUIRE) + USE,
    ),
    (AGAIN + USE + ends(1), NO_ACQUIRE, AGAIN + by("p0", RELEASE, ACQUIRE) + USE + ends(1)),
    (AGAIN + by("p0", ACQUIRE) + USE + ends(1), LET_GO, ""),
    (USE + by("p0", TO_B), READS, USE + ends(0, "V") + by("p0", TO_B)),
    (USE + by("p1", TO_B), READS, USE + ends(0, "V") + by("p1", TO_B)),
    (USE + by("p0", "st.global.u64 [%map], %b;"), READS, ""),
    (
        STORE + by("p0", TO_B, f"{WAIT} 0;"), READS,
        STORE + by("p0", f"{WAIT}.read 0;", TO_B, f"{WAIT} 0;"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "says", "right"), FAULTS)
def test_a_map_is_changed_fenced_and_used_in_this_order(fault, says, right):
    assert re.search(says, told(fault + _to_the_end(fault)).replace("\n", " "))
    assert not right or told(right + _to_the_end(right)) == ""


def _to_the_end(text: str) -> str:
    """A wait for the load, unless the text ends with one or has none."""
    return "" if " W:" in text or STORE in text else ends()


RIGHT = by("p0", TO_B, RELEASE) + SET, by("p0", ACQUIRE)
BETWEEN_CTAS = [  # what the first CTA does, and the second one behind its wait; what is told
    (*RIGHT, ""),
    (RIGHT[0].replace("release.gpu;", "release.cta;"), RIGHT[1], "proxy: "),
    (RIGHT[0], RIGHT[1].replace("acquire.gpu", "acquire.cta"), NO_ACQUIRE),
    (RIGHT[0], "", NO_ACQUIRE),
    (by("p0", TO_B) + SET, RIGHT[1], LET_GO),
    (by("p0", TO_B) + SET + by("p0", RELEASE), RIGHT[1], LET_GO),
    (RIGHT[0].replace("st.release", "st.relaxed"), RIGHT[1], RACE),
]


@pytest.mark.parametrize(("change", "between", "says"), BETWEEN_CTAS)
def test_a_map_goes_from_cta_to_cta_behind_a_flag_and_both_fences(change, between, says):
    found = told(FLAG.replace("CHANGE", change).replace("BETWEEN", between), 2).replace("\n", " ")
    assert re.search(says, found) if says else found == ""
