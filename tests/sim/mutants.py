"""Mutants of compiled kernels: each drops, weakens or moves one instruction that synchronises.

An operator replaces the text of one instruction, or exchanges the instruction with an access beside
it, at every place of a kernel's PTX where that is possible; so it is not bound to a kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mutations import Mutant

_INSTRUCTION = re.compile(
    r"^[ \t]*(?:\{\s*)?(?P<all>(?P<guard>@!?%?[\w$]+\s+)?(?P<op>[a-z][\w.:]*)\s*[^;]*;)", re.M
)
# Accesses to memory that others share, or that are asynchronous.
_ACCESS = re.compile(
    r"(ld|st)\.(shared|global|volatile)|ldmatrix|stmatrix|tcgen05\.(ld|st|mma|cp)|wgmma\.mma"
    r"|cp\.(reduce\.)?async\.(bulk\.tensor|bulk\.shared|bulk\.global|ca|cg)|(red|atom)\."
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
    """A wait that never waits."""
    predicate = re.search(r"_wait\S*\s+([%\w]+)\s*,", text)
    assert predicate
    return f"setp.eq.u32 {predicate[1]}, 0, 0;"


def _replace(pattern: str, replacement: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, replacement, text)


def _number(change: int, least: int, pattern: str = r", (\d+);") -> Callable[[str], str]:
    """Add ``change`` to the immediate that ``pattern`` finds, if the sum is at least ``least``."""

    def number(text: str) -> str:
        m = re.search(pattern, text)
        if m is None or int(m[1]) + change < least:
            return text
        return text[: m.start(1)] + str(int(m[1]) + change) + text[m.end(1) :]

    return number


def _operand(which: str, compute: str, kind: str = "b32") -> Callable[[str], str]:
    """Replace the operand that ``which`` finds by ``other``, which ``compute`` sets."""

    def operand(text: str) -> str:
        m = re.search(which, text)
        if m is None:
            return text
        changed = text[: m.start(1)] + "other" + text[m.end(1) :]
        return f"{{ .reg .{kind} other; {compute.format(m[1])} {changed} }}"

    return operand


_PARITY = r"_wait\.parity\S*\s+[%\w]+,\s*\[[^\]]*\],\s*(%\w+|\d+)"
_LAST = r",\s*(%\w+|\d+)\s*;"
_ONE_LESS_OF_A_MASK = "sub.u16 other, {0}, 1; and.b16 other, other, {0};"

# name: opcode (a pattern), the change of its text
OPERATORS: dict[str, tuple[str, Callable[[str], str]]] = {
    "an mbarrier's wait": (r"mbarrier\.(try|test)_wait", _pass),
    "another parity": (r"mbarrier\.\w+\.parity", _operand(_PARITY, "xor.b32 other, {}, 1;")),
    "an mbarrier's arrival": (r"mbarrier\.arrive", _drop),
    "an arrival in another CTA": (r"mapa", _operand(_LAST, "xor.b32 other, {}, 1;")),
    "an mbarrier's initialisation": (r"mbarrier\.init", _drop),
    "an arrival less": (r"mbarrier\.init", _operand(_LAST, "sub.s32 other, {}, 1;")),
    "an arrival more": (r"mbarrier\.init", _operand(_LAST, "add.s32 other, {}, 1;")),
    "16 bytes more": (r"mbarrier\.(arrive\.)?expect_tx", _operand(_LAST, "add.s32 other, {}, 16;")),
    "half the bytes": (r"mbarrier\.(arrive\.)?expect_tx", _operand(_LAST, "shr.u32 other, {}, 1;")),
    "a wait for wgmma": (r"wgmma\.wait_group", _drop),
    "a wait for one wgmma group more": (r"wgmma\.wait_group", _number(1, 1, r"(\d+);")),
    "a group of wgmma": (r"wgmma\.commit_group", _drop),
    "a fence of wgmma": (r"wgmma\.fence", _drop),
    "a commit of tcgen05": (r"tcgen05\.commit", _drop),
    "a commit to one CTA less": (
        r"tcgen05\.commit.*multicast", _operand(_LAST, _ONE_LESS_OF_A_MASK, "b16")
    ),
    "a wait for tcgen05.ld": (r"tcgen05\.wait::ld", _drop),
    "a wait for tcgen05.st": (r"tcgen05\.wait::st", _drop),
    "a fence of tcgen05": (r"tcgen05\.fence", _drop),
    "a dealloc": (r"tcgen05\.dealloc", _drop),
    "a fence of proxies": (r"fence\.proxy\.async", _drop),
    "another fence": (r"(fence|membar)\.(?!proxy)", _drop),
    "a named barrier": (r"(bar|barrier\.cta)\.(sync|arrive)", _drop),
    "a named barrier only arrived at": (
        r"bar\.sync", _replace(r"bar\.sync(\s+[%\w]+\s*,)", r"bar.arrive\1")
    ),
    "a warp less at a named barrier": (r"bar\.(sync|arrive)", _number(-32, 32, r",\s*(\d+);")),
    "a barrier of a warp": (r"bar\.warp\.sync", _drop),
    "a cluster's arrival": (r"barrier\.cluster\.arrive", _drop),
    "a cluster's arrival, relaxed": (
        r"barrier\.cluster\.arrive(?!\.relaxed)", _replace(r"\.arrive", ".arrive.relaxed")
    ),
    "a cluster's wait": (r"barrier\.cluster\.wait", _drop),
    "a wait for bulk stores": (r"cp\.async\.bulk\.wait_group", _drop),
    "a wait for one bulk store more": (
        r"cp\.async\.bulk\.wait_group", _number(1, 1, r"(\d+);")
    ),
    "a group of bulk stores": (r"cp\.async\.bulk\.commit_group", _drop),
    "a wait for cp.async": (r"cp\.async\.(wait_group|wait_all)", _drop),
    "a load for one CTA less": (
        r"cp\.async\.bulk.*multicast::cluster",
        _operand(r",\s*(%rs\d+)\s*[,;]", _ONE_LESS_OF_A_MASK, "b16"),
    ),
    "every lane elected": (
        r"elect\.sync", _replace(r"elect\.sync\s+\S+\|(%\w+),[^;]*;", r"setp.eq.u32 \1, 0, 0;")
    ),
    "a wait for the grid before": (r"griddepcontrol\.wait", _drop),
    "registers not given back": (r"setmaxnreg\.dec", _drop),
    "an atomic that is none": (
        r"(atom|red)\.(?!async).*\.add\.(u32|s32)$",
        lambda text: _not_atomic(text),
    ),
}  # fmt: skip


def _not_atomic(text: str) -> str:
    """Replace an atomic by a load, a sum and a store."""
    m = re.search(r"^(@\S+\s+)?(?:atom|red)\S*\s+(?:([%\w]+),\s*)?(\[[^\]]*\]),\s*([%\w]+);", text)
    if m is None:
        return text
    guard, old, place, value = m[1] or "", m[2] or "was", m[3], m[4]
    return (
        f"{{ .reg .b32 was; .reg .b32 other; {guard}ld.global.b32 {old}, {place}; "
        f"{guard}add.s32 other, {old}, {value}; {guard}st.global.b32 {place}, other; }}"
    )


# Arrivals, moved before the access that they follow; waits, moved behind the one they precede.
EARLIER: dict[str, str] = {
    "an mbarrier's arrival, earlier": r"mbarrier\.arrive(?!.*expect_tx)",
    "a commit of tcgen05, earlier": r"tcgen05\.commit",
    "a named barrier, earlier": r"bar\.(sync|arrive)",
    "a fence of proxies, earlier": r"fence\.proxy\.async",
    "a group of wgmma, earlier": r"wgmma\.commit_group",
    "a group of bulk stores, earlier": r"cp\.async\.bulk\.commit_group",
    "a cluster's arrival, earlier": r"barrier\.cluster\.arrive",
}
LATER: dict[str, str] = {
    "a wait for wgmma, later": r"wgmma\.wait_group",
    "a fence of wgmma, later": r"wgmma\.fence",
    "a wait for tcgen05.ld or st, later": r"tcgen05\.wait",
    "a fence of tcgen05, later": r"tcgen05\.fence::after",
    "a named barrier, later": r"bar\.sync",
    "a wait for bulk stores, later": r"cp\.async\.bulk\.wait_group",
    "a cluster's wait, later": r"barrier\.cluster\.wait",
    "a wait for the grid before, later": r"griddepcontrol\.wait",
}
ALL = (*OPERATORS, *EARLIER, *LATER)


def sites(kernel, operator: str) -> Iterator[Site]:
    """All mutants of a compiled kernel by one operator."""
    ptx = kernel.ptx
    if operator in OPERATORS:
        changes = _replaced(ptx, operator)
    else:
        changes = _moved(ptx, operator)
    for m, changed in changes:
        line = ptx.count("\n", 0, m.start("all")) + 1
        text = " ".join(m["all"].split())
        yield Site(operator, line, text, Mutant(kernel.object_path, kernel.symbol, changed))


def _replaced(ptx: str, operator: str) -> Iterator[tuple[re.Match[str], str]]:
    opcode, change = OPERATORS[operator]
    for m in _INSTRUCTION.finditer(ptx):
        if not re.match(opcode, m["op"]) or (text := change(m["all"])) == m["all"]:
            continue
        if operator == "an arrival less" and _constant(ptx[: m.start()], m["all"]) == 1:
            continue  # the barrier without an id is not used
        yield m, ptx[: m.start("all")] + text + ptx[m.end("all") :]


def _constant(before: str, text: str) -> int | None:
    """The last operand of an instruction, if it is a number; else None."""
    m = re.search(_LAST, text)
    if m is None or m[1].isdigit():
        return m and int(m[1])
    made = re.findall(rf"\b\w[\w.]*\s+{re.escape(m[1])},\s*([^;]*);", before)
    return int(made[-1]) if made and made[-1].isdigit() else None


# Pieces of code that stay whole: an elected thread's code; inline assembly; an instruction.
_UNIT = re.compile(
    r"^[ \t]*elect\.sync[^;]*;\s*(?:(?:\.loc[^\n]*|not\.pred[^;]*;)\s*)*"
    r"@!?%p\d+ bra\s+(?P<to>\$\w+);"
    r"(?:(?!\bbra\b|^\$)[\s\S])*?\n(?P=to):"
    r"|^[ \t]+\{[^{}]*\n(?:[^\n]*\n)*?[ \t]*\}[ \t]*$"
    r"|" + _INSTRUCTION.pattern.replace("(?P<all>", "(?P<one>"),
    re.M,
)


def _moved(ptx: str, operator: str) -> Iterator[tuple[re.Match[str], str]]:
    """The instruction that the operator moves, and the PTX that results, for each place."""
    step = -1 if operator in EARLIER else 1
    opcode = (EARLIER | LATER)[operator]
    units = list(_UNIT.finditer(ptx))
    for i, unit in enumerate(units):
        inside = _INSTRUCTION.finditer(ptx, unit.start(), unit.end())
        m = next((m for m in inside if re.match(opcode, m["op"])), None)
        if m is None or (passed := _up_to_an_access(ptx, units, i, step)) is None:
            continue
        texts = [u.group() for u in passed]
        if step < 0:
            order = _ahead(texts, unit.group())
            low, high = passed[-1].start(), unit.end()
        else:
            order = [*texts, unit.group()]
            low, high = unit.start(), passed[-1].end()
        if order is not None:
            yield m, ptx[:low] + "\n".join(order) + ptx[high:]


def _up_to_an_access(
    ptx: str, units: list[re.Match[str]], i: int, step: int
) -> list[re.Match[str]] | None:
    """The units from the one beside unit i to the next access, within straight-line code."""
    passed: list[re.Match[str]] = []
    while 0 <= i + step < len(units):
        first, last = sorted((units[i], units[i + step]), key=lambda m: m.start())
        between = re.sub(r"//[^\n]*|\.(loc|pragma)[^\n]*", "", ptx[first.end() : last.start()])
        i += step
        passed.append(units[i])
        if between.strip() or _leaves(units[i]):
            return None
        if any(_ACCESS.match(m["op"]) for m in _INSTRUCTION.finditer(units[i].group())):
            return passed
    return None


def _ahead(passed: list[str], text: str) -> list[str] | None:
    """``passed``, from ``text`` back to an access, with ``text`` and the instructions that set its
    registers before the access; None where the access sets them, or a wait would move along.
    """
    needs, along, stays = _named(text), [text], list[str]()
    for other in passed[:-1]:
        if _made(other) & needs:
            needs |= _named(other)
            along.insert(0, other)
        else:
            stays.insert(0, other)
    if _made(passed[-1]) & needs or any("wait" in other for other in along[:-1]):
        return None
    return [*along, passed[-1], *stays]


def _leaves(unit: re.Match[str]) -> bool:
    return bool(unit["one"] and re.search(r"\b(bra\S*|ret|exit)\s", unit.group()))


def _named(text: str) -> set[str]:
    return set(re.findall(r"%[a-z]+\d+", text))


def _made(text: str) -> set[str]:
    """The registers that instructions write: their first operands, except those of stores and the
    like.
    """
    made = re.findall(r"(?:^|;)\s*(?:@\S+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|[^;}\[,]*)[,;]", text, re.M)
    return _named(" ".join(made))
