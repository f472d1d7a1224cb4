"""PTX that the tests of synchronisation share."""

from __future__ import annotations

import numpy as np
from ptx_kernel import Shape, simulate_ptx

from cutex.orders import ORDERS

START = "mov.b32 %r99, 0;"  # the rounds of a loop that waits
EVERY_ORDER = [{"order": o} for o in ORDERS if o != "random"]
EVERY_ORDER += [{"order": "random", "seed": s} for s in range(3)]


def each_order(body: str, arrays: dict, shape: Shape, **more) -> list[np.ndarray]:
    """Run the snippet in every order, and return the last array, which must be the same each
    time."""
    name = list(arrays)[-1]
    found = []
    for order in EVERY_ORDER:
        fresh = {n: a.copy() for n, a in arrays.items()}
        simulate_ptx(body, fresh, shape, **order, **more)
        found.append(fresh[name])
    for other in found[1:]:
        assert (other == found[0]).all()
    return found[0]


def again(label: str, predicate: str) -> str:
    """A branch back to ``label`` while ``predicate`` holds, at most 200000 times, so that no GPU
    hangs.
    """
    return (
        "add.u32 %r99, %r99, 1; setp.lt.and.u32 %p15, %r99, 200000, "
        f"{predicate}; @%p15 bra {label};"
    )


def wait(bar: str, parity: object, name: str, space: str = "shared::cta") -> str:
    """A wait for a phase."""
    return f"""{START}
    {name}: mbarrier.try_wait.parity.{space}.b64 %p14, [{bar}], {parity}; {again(name, "!%p14")}
    """


INIT = """
    .reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p0, %i, 0;
    @%p0 mbarrier.init.shared.b64 [bar], COUNT; bar.sync 0;
"""


def init(count: int) -> str:
    return INIT.replace("COUNT", str(count))


def copy(to: str, frm: str, size: int) -> str:
    name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return f"{name} [{to}], [{frm}], {size}, [bar];"


def rows(rows: int, columns: int) -> np.ndarray:
    """Random numbers at a multiple of 16 bytes, for bulk copies."""
    raw = np.zeros(rows * columns * 4 + 16, np.uint8)
    start = -raw.ctypes.data % 16
    array = raw[start : start + rows * columns * 4].view(np.uint32).reshape(rows, columns)
    array[...] = np.random.default_rng(2).integers(0, 1 << 20, (rows, columns))
    return array


CLUSTER_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# of tensor memory: columns of a CTA or a pair, by the place of their address
ALLOC = "tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [%r{at}], {n};"
FREE = "tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 %r{at}, {n};"
