"""The modifiers of each opcode, in their order, as the PTX ISA's syntax sections give them.

A definition looks for the modifiers that change its result; a modifier that it does not look for
must not pass silently. So each opcode's modifiers are matched with a regular expression of all that
it may have. For an opcode without one, its definition lists those that it implements
(`Decoder.only`).
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

BRANCHES = ("bra", "ret", "exit", "trap")  # opcodes that the scheduler itself executes

_INT = r"\.[us](16|32|64)"
_MOVED = r"\.(b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64|b128)"
_ANY = rf"({_MOVED}|\.[bus]8)"
_ROUND = r"(\.r[nzmp])?"
_HALF = r"\.(f16|f16x2|bf16|bf16x2)"
_SHARED = r"\.shared(::cta|::cluster)?"
_SCOPE = r"\.(cta|cluster|gpu|sys)"
_SPACE = rf"(\.(global|local|const|generic|param(::entry|::func)?)|{_SHARED})?"
_WRITABLE = rf"(\.(global|local|generic|param(::entry|::func)?)|{_SHARED})?"
_COMMON = rf"(\.(global|generic)|{_SHARED})?"  # what several threads write to
_PRIORITY = (
    r"\.(L1::)?(evict_\w+|no_allocate)|\.L2::evict_\w+|\.level::eviction_priority|"
    r"\.L2::cache_hint"
)
_FETCHED = rf"({_PRIORITY}|\.L2::(64|128|256)B)*"
_KEPT = rf"({_PRIORITY})*"


def _ordered(orders: str, space: str) -> str:
    """An order with its scope, and a space.

    NOTE: NVIDIA's assembler takes both in either order, and an example of CUTLASS has
    ld.global.acquire (cooperative_launch.py)
    """
    order = rf"\.({orders}){_SCOPE}"
    return rf"({order}{space}|{space}{order})"


_GLOBAL = r"(\.(global|generic))?"  # what a priority is for
# an order goes with no choice of caches
_LOAD = (
    rf"((\.weak)?{_SPACE}|{_SPACE}\.weak)(\.(ca|cg|cs|lu|cv))?(\.unified)?|"
    rf"(\.weak)?{_GLOBAL}{_FETCHED}(\.(ca|cg|cs|lu|cv))?(\.unified)?{_FETCHED}|"
    rf"\.global{_FETCHED}(\.(ca|cg|cs))?{_FETCHED}\.nc{_FETCHED}|"
    rf"(\.volatile{_COMMON}|{_COMMON}\.volatile)|\.volatile{_GLOBAL}\.L2::(64|128|256)B|"
    rf"{_ordered('relaxed|acquire', _COMMON)}|{_ordered('relaxed|acquire', _GLOBAL)}{_FETCHED}"
)
_STORE = (
    rf"((\.weak)?{_WRITABLE}|{_WRITABLE}\.weak)(\.(wb|cg|cs|wt))?|"
    rf"(\.weak)?{_GLOBAL}{_KEPT}(\.(wb|cg|cs|wt))?{_KEPT}|"
    rf"(\.volatile{_COMMON}|{_COMMON}\.volatile)|"
    rf"{_ordered('relaxed|release', _COMMON)}|{_ordered('relaxed|release', _GLOBAL)}{_KEPT}"
)
_GROUP = r"\.cta_group::[12]"
_ALIGNED = r"\.sync\.aligned"

_COMPARE = "eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan"
_COMPARED = r"\.([bus](16|32|64)|f(32|64)|f16|f16x2|bf16|bf16x2)"
_FLOAT = (
    rf"{_ROUND}((\.ftz)?(\.sat)?\.f32|(\.ftz)?\.f32x2|\.f64)|"
    r"(\.rn)?((\.ftz)?(\.sat)?\.f16(x2)?|\.bf16(x2)?)"
)
_MIXED = r"(\.sat)?\.f32\.b?f16"  # f32 with a half (PTX ISA 9.7.5)
_ROUNDED = r"\.r[nzmp]"  # which an instruction must have
_FUSED = (
    rf"{_ROUNDED}((\.ftz)?(\.sat)?\.f32|(\.ftz)?\.f32x2|\.f64)|{_ROUNDED}{_MIXED}|"
    r"\.rn((\.ftz)?(\.sat|\.relu|\.oob(\.relu)?)?\.f16(x2)?|(\.oob)?(\.relu)?\.bf16(x2)?)"
)
# conversions: their two types tell which rounding and which limits they have, or must have
_WHOLE = r"\.[us](8|16|32|64)"
_TO_WHOLE = rf"{_ROUNDED}i"
_LIMITED = r"(\.relu|\.satfinite){0,2}"
_EIGHT = r"\.e\dm\dx2"
_CONVERT = (
    rf"(\.sat)?{_WHOLE}{_WHOLE}|"
    rf"{_TO_WHOLE}((\.ftz)?(\.sat)?{_WHOLE}\.f32|(\.sat)?{_WHOLE}\.f(16|64)|{_INT}\.bf16)|"
    rf"{_ROUNDED}((\.ftz)?(\.sat)?\.f32{_WHOLE}|(\.sat)?\.f(16|64){_WHOLE}|\.bf16{_INT})|"
    rf"{_ROUNDED}((\.sat)?\.f16\.f64|\.bf16\.f64|(\.ftz)?(\.sat)?\.f(32\.f64|16\.f32)|"
    r"(\.ftz)?\.bf16\.f32)|"
    rf"\.r[nz]{_LIMITED}\.b?f16\.f32|"
    r"(\.sat)?\.f64\.f16|(\.ftz)?(\.sat)?\.f(64\.f32|32\.f16)|"
    rf"({_TO_WHOLE})?((\.sat)?\.(f16\.f16|f64\.f64)|(\.ftz)?(\.sat)?\.f32\.f32|\.bf16\.bf16)|"
    rf"{_ROUND}(\.(f16\.bf16|bf16\.f16|f64\.bf16)|(\.ftz)?\.f32\.bf16)|"
    rf"\.r[nzs]{_LIMITED}\.b?f16x2\.f32|\.(r[nz]{_LIMITED}|rna(\.satfinite)?)\.tf32\.f32|"
    rf"\.rn(\.relu)?\.f16x2{_EIGHT}|\.rn\.bf16x2\.ue8m0x2|"
    rf"\.rn(\.relu)?\.satfinite(\.relu)?{_EIGHT}\.(f32|b?f16x2)|"
    rf"\.rs(\.relu)?\.satfinite(\.relu)?\.e\dm\dx4\.f32|\.r[zp](\.satfinite)?\.ue8m0x2\.(f32|bf16x2)|"
    r"\.rn(\.(relu|satfinite|scaled::n2::ue8m0))*"
    r"\.(bf16x2\.(s2f6x2|e\dm\dx2)|s2f6x2\.(f32|bf16x2))"
)
_EXTREMUM = rf"(\.ftz)?(\.NaN)?(\.xorsign\.abs)?(\.relu)?(\.f(32|64)|{_HALF})"


def _matrices(shapes: str) -> str:
    """Shape and number of the matrices of an ldmatrix or stmatrix.

    NOTE: CUTLASS writes the number first (copy_sm75.hpp), and NVIDIA's assembler takes that.
    """
    count = r"\.x[124](\.trans)?"
    return rf"(\.({shapes}){count}|{count}\.({shapes}))"


FORMS = {
    "add sub": rf"(\.sat)?\.s32|{_INT}|\.[us]16x2|(\.cc)?\.[us](32|64)|{_FLOAT}|{_ROUND}{_MIXED}",
    "addc subc": r"(\.cc)?\.[us](32|64)",
    "mul": rf"\.(lo|hi){_INT}|\.wide\.[us](16|32)|{_FLOAT}",
    "mad": rf"\.(lo|hi)(\.cc)?{_INT}|\.wide\.[us](16|32)|\.hi\.sat\.s32|"
    rf"{_ROUNDED}((\.ftz)?(\.sat)?\.f32|\.f64)",
    "madc": r"\.(lo|hi)(\.cc)?\.[us](32|64)",
    "fma": _FUSED,
    "mul24 mad24": r"\.(hi|lo)\.[us]32",
    "sad rem": _INT,
    "div": rf"{_INT}|(\.approx|\.full|\.r[nzmp])?(\.ftz)?\.f(32|64)",
    "abs neg": rf"\.s(16|32|64)|(\.ftz)?(\.f(32|64)|{_HALF})",
    "min max": rf"{_INT}|(\.relu)?\.s(32|16x2)|\.u16x2|{_EXTREMUM}",
    "popc clz brev": r"\.b(32|64)",
    "bfe bfind": r"(\.shiftamt)?\.[us](32|64)",
    "bfi": r"\.b(32|64)",
    "bmsk szext": r"\.(clamp|wrap)\.[bus]32",
    "dp4a": r"\.[us]32\.[us]32",
    "dp2a": r"\.(lo|hi)\.[us]32\.[us]32",
    "and or xor not": r"\.(pred|b16|b32|b64)",
    "cnot": r"\.b(16|32|64)",
    "lop3": r"\.b32",
    "shl": r"\.b(16|32|64)",
    "shr": r"\.[bus](16|32|64)",
    "shf": r"\.[lr]\.(clamp|wrap)\.b32",
    "prmt": r"\.b32(\.(f4e|b4e|rc8|ecl|ecr|rc16))?",
    "copysign": r"\.f(32|64)",
    "testp": r"\.(finite|infinite|number|notanumber|normal|subnormal)\.f(32|64)",
    "rcp": r"(\.approx|\.r[nzmp])(\.ftz)?\.f(32|64)",
    "sqrt": r"(\.approx|\.r[nzmp])(\.ftz)?\.f(32|64)",
    "rsqrt": r"\.approx(\.ftz)?\.f(32|64)",
    "sin cos lg2": r"\.approx(\.ftz)?\.f32",
    "ex2": r"\.approx(\.ftz)?\.(f32|f16|f16x2|bf16|bf16x2)",
    "tanh": r"\.approx\.(f32|f16|f16x2|bf16|bf16x2)",
    "setp": rf"\.({_COMPARE})(\.(and|or|xor))?(\.ftz)?{_COMPARED}",
    "set": rf"\.({_COMPARE})(\.(and|or|xor))?(\.ftz)?"
    rf"\.([us]32|f32|f16|bf16|f16x2|bf16x2){_COMPARED}",
    "selp": r"\.([bus](16|32|64)|f(32|64))",
    "slct": r"(\.ftz)?\.([bus](16|32|64)|f(32|64))\.(s32|f32)",
    "cvt": rf"{_CONVERT}|\.pack\.sat\.([us]16\.s32|[us][248]\.s32\.b32)",
    "mov": rf"{_MOVED}|\.pred",
    "cvta": rf"(\.to)?(\.(global|local|const|param(::entry)?)|{_SHARED})\.u(32|64)",
    "isspacep": rf"\.(global|local|const|param(::entry)?)|{_SHARED}",
    "ld": rf"({_LOAD})(\.v[248])?{_ANY}",
    "ldu": rf"(\.global)?(\.v[24])?{_ANY}",
    "st": rf"({_STORE})(\.v[248])?{_ANY}|\.bulk(\.weak)?(\.shared::cta)?",
    "prefetch": r"(\.(global|local))?\.L[12](::evict_(last|normal))?|(\.(param|const))?\.tensormap",
    "prefetchu": r"\.L1",
    "applypriority": r"(\.global)?\.L2::evict_normal",
    "discard": r"(\.global)?\.L2",
    "createpolicy": r"\.(fractional|range)(\.global)?(\.L2::evict_\w+){1,2}\.b64|"
    r"\.cvt\.L2\.b64|\.fractional(\.L2::evict_\w+){1,2}(\.b64)",
    "mapa": rf"({_SHARED})?\.u(32|64)",
    "getctarank": rf"({_SHARED})?\.u(32|64)",
    "fence": rf"(\.(sc|acq_rel|acquire|release))?{_SCOPE}|\.mbarrier_init\.release\.cluster|"
    rf"\.(acquire|release)\.sync_restrict::shared::(cta|cluster)\.cluster|"
    rf"\.proxy\.(alias|async|async\.global|async{_SHARED})|"
    rf"\.proxy\.(tensormap|async)::generic\.release{_SCOPE}|"
    rf"\.proxy\.(tensormap|async)::generic\.acquire{_SCOPE}",
    "membar": r"\.(cta|gl|sys)|\.proxy\.(alias|async(\.(global|shared(::cta|::cluster)?))?)",
    "griddepcontrol": r"\.(launch_dependents|wait)",
    "nanosleep": r"\.u32",
    "pmevent": r"(\.mask)?",
    "activemask": r"\.b32",
    "shfl": r"\.sync\.(idx|up|down|bfly)\.b32",
    "vote": r"\.sync\.(all|any|uni)\.pred|\.sync\.ballot\.b32",
    "elect": r"\.sync",
    "match": r"\.(any|all)\.sync\.b(32|64)",
    "redux": r"\.sync\.(add|min|max)\.[us]32|\.sync\.(and|or|xor)\.b32|"
    r"\.sync\.(min|max)(\.abs)?(\.NaN)?\.f32",
    "bar": r"(\.cta)?(\.(sync|arrive)|\.red\.popc\.u32|\.red\.(and|or)\.pred)|\.warp\.sync",
    "barrier.sync barrier.arrive barrier.red barrier.cta": r"(\.cta)?(\.(sync|arrive)|"
    r"\.red\.popc|\.red\.(and|or))(\.aligned)?(\.(u32|pred))?",
    "barrier.cluster": r"\.cluster(\.arrive(\.(release|relaxed))?|\.wait(\.acquire)?)(\.aligned)?",
    "setmaxnreg": r"\.(inc|dec)\.sync\.aligned\.u32",
    "mbarrier.init mbarrier.inval": r"\.(init|inval)(\.shared(::cta)?)?\.b64",
    "mbarrier.pending_count": r"\.pending_count\.b64",
    "mbarrier.arrive mbarrier.arrive_drop": r"\.arrive(_drop)?(\.expect_tx)?(\.noComplete)?"
    rf"(\.(release|relaxed)(\.(cta|cluster))?)?({_SHARED})?\.b64",
    "mbarrier.expect_tx mbarrier.complete_tx": r"\.(expect|complete)_tx"
    rf"(\.relaxed)?(\.(cta|cluster))?({_SHARED})?\.b64",
    "mbarrier.test_wait mbarrier.try_wait": r"\.(test|try)_wait(\.parity)?"
    r"(\.(acquire|relaxed)(\.(cta|cluster))?)?(\.shared(::cta)?)?\.b64",
    "st.async red.async": r"\.async.*",  # see `vocabulary`
    "ldmatrix": rf"{_ALIGNED}{_matrices('m8n8|m16n16')}(\.shared(::cta)?)?\.b(8|16)|"
    rf"{_ALIGNED}\.m8n16\.x[124](\.shared(::cta)?)?\.b8x16\.b(4x16_p64|6x16_p32)",
    "movmatrix": rf"{_ALIGNED}\.m8n8\.trans\.b16",
    "stmatrix": rf"{_ALIGNED}{_matrices('m8n8|m16n8')}(\.shared(::cta)?)?\.b(8|16)",
    "wgmma.fence wgmma.commit_group wgmma.wait_group": r"\.(fence|commit_group|wait_group)"
    r"\.sync\.aligned",
    "tcgen05.dealloc": rf"\.dealloc{_GROUP}{_ALIGNED}\.b32",
    "tcgen05.relinquish_alloc_permit": rf"\.relinquish_alloc_permit{_GROUP}{_ALIGNED}",
    "tcgen05.alloc": rf"\.alloc{_GROUP}{_ALIGNED}(\.shared(::cta)?)?\.b32",
    "tcgen05.wait": rf"\.wait::(ld|st){_ALIGNED}",
    "tcgen05.fence": r"\.fence::(before|after)_thread_sync",
    "tcgen05.ld tcgen05.st": rf"\.(ld|st){_ALIGNED}"
    r"\.(32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(1|2|4|8|16|32|64|128)"
    r"(\.(un)?pack::16b)?\.b32",
    "clusterlaunchcontrol": r"\.try_cancel\.async(\.shared::cta)?\.mbarrier::complete_tx::bytes"
    r"(\.multicast::cluster::all)?\.b128|\.query_cancel\.is_canceled\.pred\.b128|"
    r"\.query_cancel\.get_first_ctaid(::[xyz])?(\.v4)?\.b32\.b128",
    "tensormap.cp_fenceproxy": rf"\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic"
    rf"\.release{_SCOPE}\.sync\.aligned",
    "cp.async": r"\.async\.(c[ag]\.shared(::cta)?\.global(\.L2::cache_hint)?(\.L2::(64|128|256)B)?|"
    r"commit_group|wait_group|wait_all|mbarrier\.arrive(\.noinc)?(\.shared(::cta)?)?\.b64|bulk.*)",
}


@lru_cache(maxsize=4096)
def opcode_parts(op: str) -> tuple[str, ...]:
    """The parts of an opcode: ("mbarrier", "test_wait", "shared", "cta") of
    "mbarrier.test_wait.shared::cta".
    """
    return tuple(p for p in re.split(r"\.|::", op) if p)


@cache
def _patterns() -> dict[str, re.Pattern[str]]:
    return {name: re.compile(form) for names, form in FORMS.items() for name in names.split()}


@lru_cache(maxsize=4096)
def _form(op: str) -> re.Pattern[str] | None:
    parts = opcode_parts(op)
    return _patterns().get(".".join(parts[:2])) or _patterns().get(parts[0])


@lru_cache(maxsize=4096)
def misfit(op: str) -> str:
    """The modifier of an opcode that does not match its form; "" if all match or no form is
    known."""
    form = _form(op)
    modifiers = op.removeprefix(opcode_parts(op)[0])
    if form is None or form.fullmatch(modifiers):
        return ""
    parts = re.findall(r"(?:\.|::)\w+", modifiers)
    for i, part in enumerate(parts):
        if form.fullmatch("".join(parts[:i] + parts[i + 1 :])):
            return f"modifier {part}"
    return "the modifiers, or their order"


def has_form(op: str) -> bool:
    """Whether `misfit` checks all of the opcode's modifiers."""
    return _form(op) is not None
