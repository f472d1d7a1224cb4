"""Buffers have the names of the variables that they are assigned to, however that is written."""

from __future__ import annotations

import linecache
import sys
from collections import Counter

import pytest
import torch
from cutlass import BFloat16, Float32, Int64, cute
from cutlass.memory import SmemAllocator

from cutex.assigned_names import assigned_name
from cutex.debug_info import Call, _position
from cutex.sim.host.loaded import load

STATEMENTS = {
    "alpha = allocate(4)": ["alpha"],
    "alpha = allocate(4); t = 3": ["alpha"],
    "t = 3; alpha = allocate(4)": ["alpha"],
    "alpha = allocate(4); beta = allocate(5); t = 1": ["alpha", "beta"],
    "alpha, beta = allocate(4), allocate(5)": ["alpha", "beta"],
    "(alpha, beta), gamma = (allocate(4), allocate(5)), allocate(6)": ["alpha", "beta", "gamma"],
    "[alpha, beta] = [allocate(4), allocate(5)]": ["alpha", "beta"],
    "alpha, beta = (allocate(n) for n in (4, 5))": ["alpha", "beta"],
    "alpha, beta = [allocate(n) for n in (4, 5)]": ["alpha", "beta"],
    "alpha, beta = tuple(allocate(n) for n in (4, 5))": ["alpha", "beta"],
    "ring = [allocate(n) for n in (4, 5, 6)]": ["ring[0]", "ring[1]", "ring[2]"],
    "ring = tuple(allocate(n) for n in (4, 5))": ["ring[0]", "ring[1]"],
    "ring = (allocate(4), allocate(5))": ["ring[0]", "ring[1]"],
    "ring = []\n    for n in (4, 5): ring.append(allocate(n))": ["ring[0]", "ring[1]"],
    "both = {'a': allocate(4), 'b': allocate(5)}": ["both['a']", "both['b']"],
    "both = {}; both['a'] = allocate(4)": ["both['a']"],
    "alpha: int = allocate(4)": ["alpha"],
    "t = (alpha := allocate(4))": ["alpha"],
    "t = view((alpha := allocate(4)))": ["alpha"],
    "alpha = view(allocate(4))": ["alpha"],
    "alpha = view(\n        allocate(4)\n    )": ["alpha"],
    "alpha = beta = allocate(4)": ["alpha"],
    "obj.sA, obj.sB = allocate(4), allocate(5)": ["obj.sA", "obj.sB"],
    "pair = make()": ["pair.full", "pair.empty"],
    "one, two = make(), make()": ["one.full", "one.empty", "two.full", "two.empty"],
    "alpha, beta = make()": ["alpha", "beta"],
    "alpha, beta = make_at_once()": ["alpha", "beta"],
    "alpha, *others = (allocate(n) for n in (4, 5, 6))": ["alpha", "others[0]", "others[1]"],
    "*others, alpha = (allocate(n) for n in (4, 5))": ["", ""],
    "both = dict(a=allocate(4), b=allocate(5))": ["both['a']", "both['b']"],
    "both = Pair(a=allocate(4), b=allocate(5))": ["both.a", "both.b"],
    "alpha = view(x=allocate(4))": ["alpha"],
    "allocate(4, 'named')": ["named"],
    "allocate(4)": [""],
}
KERNEL = """
def make():
    full, empty = allocate(1), allocate(2)
    return full, empty
def make_at_once():
    return allocate(1), allocate(2)
class Pair:
    def __init__(self, a, b): pass
def view(x):
    return x
class obj: pass
def kernel():
    {}
"""


def names_in(text: str) -> list[str]:
    """The names of all allocations of a `kernel` in `text`."""
    found, turns = [], Counter()

    def allocate(size: int, *_: str) -> int:
        stack, frame = [], sys._getframe(1)
        while frame is not None:
            stack.append(Call(file, *_position(frame.f_code, frame.f_lasti), frame.f_code.co_name))
            if frame.f_code.co_name == "kernel":
                break
            frame = frame.f_back
        found.append(assigned_name(tuple(stack), turns[tuple(stack)]))
        turns[tuple(stack)] += 1
        return size

    file = f"<kernel {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    scope = {"allocate": allocate}
    exec(compile(text, file, "exec"), scope)
    scope["kernel"]()
    return found


@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_way_to_assign(statement):
    assert names_in(KERNEL.format(statement)) == STATEMENTS[statement]


@cute.kernel
def kernel(a: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator()
    # fmt: off
    bars = smem.allocate_array(Int64, 4); layout = cute.make_layout(32)  # noqa: E702
    # fmt: on
    sX, sY = (smem.allocate_tensor(kind, layout) for kind in (Float32, BFloat16))
    sX[t] = a[t]
    sY[t] = a[t].to(BFloat16)
    a[t] = sX[t] + sY[t].to(Float32)
    bars[t % 4] = Int64(0)


@cute.jit
def launch(a: cute.Tensor):
    kernel(a).launch(grid=(1, 1, 1), block=(32, 1, 1))


def test_a_compiled_kernel_has_these_names():
    _, programs = load(launch, (torch.zeros(32),), "sm_90a")
    (program,) = programs.values()
    assert [b.name for b in program.buffers] == ["bars", "sX", "sY"]
