"""Faults of many kinds, planted in small kernels: each is found, and the first line of its report
names the line at fault.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import planted_kernels
import pytest
import torch

from cutex.sim import SimError, simulate

SOURCE = Path(planted_kernels.__file__)


class Plant(NamedTuple):
    """``old``, a line of the kernel or a part of one, is replaced by ``new``. ``fault``: a part of
    the line that the report must name.
    """

    kernel: str
    old: str
    new: str
    fault: str
    says: str  # the report's rule, or another part of its first line


ADDS = "sX[row, thread] = sX[row, thread] + 1"
LOADS = "cute.copy(x.atom, tXgX[None, part]"
STORES = "cute.copy(y.atom, tYsY"
WGMMA = "cute.gemm(tiled_mma, tCrC"
CLUSTER = "    cute.arch.cluster_arrive(){}\n    cute.arch.cluster_wait()\n"
PLANTS = {
    # -- a tile by TMA, and back
    "a wait for a load is missing": Plant(
        "add_one", "cute.arch.mbarrier_wait(loaded, 0)", "pass", ADDS, "race"
    ),
    "a wait is tried once": Plant(
        "add_one", "cute.arch.mbarrier_wait(loaded, 0)", "cute.arch.mbarrier_try_wait(loaded, 0)",
        ADDS, "race",
    ),
    "a wait has the wrong parity": Plant(
        "add_one", "mbarrier_wait(loaded, 0)", "mbarrier_wait(loaded, 1)", "(loaded, 1)", "race"
    ),
    "a proxy fence is missing": Plant(
        "add_one", "cute.arch.fence_view_async_shared()", "pass", STORES, "proxy"
    ),
    "a barrier before a store is missing": Plant(
        "add_one", "cute.arch.sync_threads()  # of the sums", "", STORES, "race"
    ),
    "an mbarrier is used before it is published": Plant(
        "add_one", "cute.arch.sync_threads()  # of the barrier", "", "(loaded, 0)", "race"
    ),
    "too few bytes are announced": Plant(
        "add_one", "(loaded, TILE_BYTES)", "(loaded, TILE_BYTES // 2)", "// 2)", "deadlock"
    ),
    "too many bytes are announced": Plant(
        "add_one", "(loaded, TILE_BYTES)", "(loaded, TILE_BYTES * 2)", "* 2)", "deadlock"
    ),
    "an mbarrier expects an arrival too many": Plant(
        "add_one", "mbarrier_init(loaded, 1)  # of a", "mbarrier_init(loaded, 2)  # of a",
        "mbarrier_init(loaded, 2)", "deadlock",
    ),
    "a CTA leaves before its store has read": Plant(
        "add_one", "cute.arch.cp_async_bulk_wait_group(0)", "pass", STORES, "exit"
    ),
    "a store is of no group": Plant(
        "add_one", "cute.arch.cp_async_bulk_commit_group()", "pass", STORES, "exit"
    ),
    "an index is out of bounds": Plant(
        "add_one", "cutlass.range(TILE[0], unroll=1)", "cutlass.range(TILE[0] + 1, unroll=1)", ADDS,
        "bad address",
    ),
    # -- roles and a ring
    "a slot is released early": Plant(
        "sums",
        "total += sX[0, thread, slot]\n            cute.arch.mbarrier_arrive(empty + slot)",
        "cute.arch.mbarrier_arrive(empty + slot)\n            total += sX[0, thread, slot]",
        LOADS, "race",
    ),
    "an mbarrier expects a warp too few": Plant(
        "sums", "mbarrier_init(empty + thread, PART)", "mbarrier_init(empty + thread, PART - 32)",
        "PART - 32", "deadlock",
    ),
    "the loader does not wait for a free slot": Plant(
        "sums", "cute.arch.mbarrier_wait(empty + slot, phase ^ 1)", "pass",
        "mbarrier_arrive_and_expect_tx(full + slot", "barrier misuse",
    ),
    "roles wait for each other": Plant(
        "sums", "mbarrier_wait(empty + slot, phase ^ 1)", "mbarrier_wait(empty + slot, phase)",
        "mbarrier_wait(empty + slot, phase)", "deadlock",
    ),
    "a named barrier counts a warp too many": Plant(
        "sums", "number_of_threads=PART)", "number_of_threads=PART + 32)", "PART + 32)", "deadlock"
    ),
    "a named barrier is missing": Plant(
        "sums", "cute.arch.barrier(barrier_id=1, number_of_threads=PART)", "pass",
        "partial[0] + partial[1]", "race",
    ),
    "an atomic is missing": Plant(
        "sums", "cute.arch.atomic_add(mSum.iterator, partial[0] + partial[1])",
        "mSum[0] = mSum[0] + partial[0] + partial[1]", "mSum[0] = mSum[0]", "race",
    ),
    # -- a cluster
    "a cluster barrier is missing": Plant(
        "exchange", CLUSTER.format("  # both have stored"), "", "= mine[0]", "race"
    ),
    "a CTA leaves while the other reads its shared memory": Plant(
        "exchange", CLUSTER.format("  # no thread leaves before"), "", "= mine[0]", "exit"
    ),
    "registers are asked for that nobody gives back": Plant(
        "exchange", "block=[64, 1, 1], cluster", "block=[512, 1, 1], cluster",
        "increase(168)", "deadlock",
    ),
    # -- tensor cores
    "a wait for wgmma is missing": Plant(
        "hopper", "        warpgroup.wait_group(0)\n", "", WGMMA, "race"
    ),
    "a fence of wgmma is missing": Plant(
        "hopper", "        warpgroup.fence()\n", "", WGMMA, "race"
    ),
    "a descriptor has another swizzle than the tensor map": Plant(
        "hopper", "allocate_slots(smem, BFloat16, a.smem_layout)  # by wgmma",
        "allocate_slots(smem, BFloat16, slots_layout(BFloat16, BM, BK, 1, 64))", WGMMA, "swizzle",
    ),
    "an operand is read that nothing has written": Plant(
        "hopper", "load_b.smem[None, 0], tma", "load_a.smem[None, 0], tma", WGMMA,
        "uninitialised",
    ),
    "a commit is missing": Plant(
        "blackwell", "tcgen05.commit(done)", "pass", "mbarrier_wait(done", "deadlock"
    ),
    "tensor memory is freed early": Plant(
        "blackwell", "    cute.arch.sync_threads()  # of the loads\n", "", "dealloc_tmem(acc",
        "bad address",
    ),
    "tensor memory is not freed": Plant(
        "blackwell", "        cute.arch.dealloc_tmem(acc, 32)\n", "        pass\n",
        "alloc_tmem(32", "tensor memory",
    ),
    "a buffer is loaded while the MMA still reads it": Plant(
        "blackwell", "            cute.arch.mbarrier_wait(done, k_tile % 2)\n", "",
        "load_a.load(k_tile", "race",
    ),
}  # fmt: skip


def load(text: str, folder: Path):
    file = folder / "planted.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(f"planted_{abs(hash(text))}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, file


def run(module, kernel: str):
    arguments, expected = module.operands(kernel)
    arch = "sm_100a" if kernel == "blackwell" else "sm_90a"
    report = simulate(getattr(module, kernel), *arguments, arch=arch)
    return report, arguments[-1], expected


@pytest.mark.parametrize("kernel", ["add_one", "sums", "exchange", "hopper", "blackwell"])
def test_the_kernels_are_right(kernel):
    _, result, expected = run(planted_kernels, kernel)
    assert torch.equal(result, expected)


LATER = [  # behind the slow marker: kinds of which others run always
    "an mbarrier is used before it is published", "a store is of no group",
    "a named barrier counts a warp too many", "a fence of wgmma is missing",
    "an operand is read that nothing has written", "tensor memory is not freed",
    "a buffer is loaded while the MMA still reads it", "a wait is tried once",
]  # fmt: skip


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in LATER else []) for n in PLANTS],
)
def test_a_planted_fault_is_found_and_its_line_named(name, tmp_path):
    plant = PLANTS[name]
    text = SOURCE.read_text()
    assert text.count(plant.old) == 1, "a plant changes one place"
    text = text.replace(plant.old, plant.new)
    module, file = load(text, tmp_path)
    with pytest.raises(SimError) as raised:
        run(module, plant.kernel)
    report = str(raised.value)
    head = re.sub(r"^\d+ hazards? found\n", "", report).partition("\n")[0]
    named = {int(n) for n in re.findall(rf"{re.escape(str(file))}:(\d+)", head)}
    lines = [n for n, line in enumerate(text.splitlines(), 1) if plant.fault in line]
    assert named & set(lines), report
    assert plant.says in head, report
