"""Mutants of compiled kernels: each drops or changes one instruction that synchronises."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mutations import Mutant

_INSTRUCTION = re.compile(
    r"^[ \t]*(?:\{\s*)?(?P<all>(?:@!?%?[\w$]+\s+)?(?P<op>[a-z][\w.:]*)\s*[^;{}]*;)", re.M
)


class Site(NamedTuple):
    """An instruction of a kernel that an operator changes."""

    operator: str
    line: int  # of the PTX
    text: str
    mutant: Mutant


def _drop(text: str) -> str:
    return ""


def _pass(text: str) -> str:
    """A wait that lets everybody through."""
    predicate = re.search(r"_wait\S*\s+([%\w]+)\s*,", text)
    assert predicate
    return f"setp.eq.u32 {predicate[1]}, 0, 0;"


def _one_more(text: str) -> str:
    """A wait that leaves one group more in flight."""
    return re.sub(r"(\d+);", lambda m: f"{int(m[1]) + 1};", text)


def _one_less(text: str) -> str:
    """An mbarrier that expects one arrival less; the same where it expects one."""
    return re.sub(r", ([2-9]|\d\d+);", lambda m: f", {int(m[1]) - 1};", text)


OPERATORS: dict[str, tuple[str, Callable[[str], str]]] = {  # name: opcode, what becomes of it
    "an mbarrier's wait": ("mbarrier.try_wait", _pass),
    "an mbarrier's arrival": ("mbarrier.arrive", _drop),
    "an mbarrier's initialisation": ("mbarrier.init", _drop),
    "an arrival less": ("mbarrier.init", _one_less),
    "a wait for wgmma": ("wgmma.wait_group", _drop),
    "a wait for one wgmma group more": ("wgmma.wait_group", _one_more),
    "a group of wgmma": ("wgmma.commit_group", _drop),
    "a fence of wgmma": ("wgmma.fence", _drop),
    "a commit of tcgen05": ("tcgen05.commit", _drop),
    "a wait for tcgen05.ld": ("tcgen05.wait::ld", _drop),
    "a wait for tcgen05.st": ("tcgen05.wait::st", _drop),
    "a fence of tcgen05": ("tcgen05.fence", _drop),
    "a dealloc": ("tcgen05.dealloc", _drop),
    "a fence of proxies": ("fence.proxy.async", _drop),
    "a named barrier": ("bar.sync", _drop),
    "a cluster's arrival": ("barrier.cluster.arrive", _drop),
    "a cluster's wait": ("barrier.cluster.wait", _drop),
    "a wait for bulk stores": ("cp.async.bulk.wait_group", _drop),
    "a wait for one bulk store more": ("cp.async.bulk.wait_group", _one_more),
    "a group of bulk stores": ("cp.async.bulk.commit_group", _drop),
}


def sites(kernel, operator: str) -> Iterator[Site]:
    """Every mutant that an operator makes of a compiled kernel."""
    opcode, change = OPERATORS[operator]
    for m in _INSTRUCTION.finditer(kernel.ptx):
        text = m["all"]
        if m["op"].startswith(opcode) and change(text) != text:
            ptx = kernel.ptx[: m.start("all")] + change(text) + kernel.ptx[m.end("all") :]
            line = kernel.ptx.count("\n", 0, m.start("all")) + 1
            yield Site(operator, line, text.strip(), Mutant(kernel.object_path, kernel.symbol, ptx))
