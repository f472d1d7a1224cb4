"""Instructions of the PTX ISA that the simulator does not run, and how wrong ones are recognised.

`forms` has the syntax of what definitions implement. Here stand the forms beyond it: of opcodes
without a definition, and of those whose definition takes a part of what the ISA has. An instruction
that matches neither does not exist: it is reported with its line when the PTX is read, also where
no run reaches it. One that exists and has no definition is only reported if a run does not reach
it: an advisory, as the run's result does not depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache

from cutex.sim.ptx.forms import BRANCHES, has_form, misfit, opcode_parts

_HINT = r"(\.L2::cache_hint)?"
_BYTES = r"\.mbarrier::complete_tx::bytes"
_BYTES_OF = rf"(\.shared::cluster{_BYTES}|{_BYTES}\.shared::cluster|{_BYTES})"
_LOADED = r"(\.(tile(::gather4)?|im2col(::w(::128)?)?(_no_offs)?))?"
_CAST = r"(\.multicast::cluster)?(\.cta_group::[12])?"
_BULK = (
    rf"bulk\.(commit_group|wait_group(\.read)?|prefetch\.L2\.global{_HINT}|"
    rf"prefetch\.tensor\.[1-5]d\.L2(\.global)?{_LOADED}{_HINT}|"
    rf"shared::(cta|cluster)\.(global|shared::cta){_BYTES}{_CAST}(\.ignore_oob)?{_HINT}|"
    rf"global\.shared::cta\.bulk_group{_HINT}(\.cp_mask)?|"
    rf"tensor\.[1-5]d\.shared::(cta|cluster)\.global{_LOADED}{_BYTES}{_CAST}{_HINT}|"
    rf"tensor\.[1-5]d\.global\.shared::cta(\.(tile(::scatter4)?|im2col_no_offs))?"
    rf"\.bulk_group{_HINT})"
)
_SCOPE = r"\.(cta|cluster|gpu|sys)"
_SHARED = r"\.shared(::cta|::cluster)?"
# NOTE: the assembler takes the order, the scope and the space of an atomic in any order
_WHERE = rf"(\.(weak|relaxed|acquire|release|acq_rel)|{_SCOPE}|\.global|{_SHARED}){{0,4}}"
_ATOMIC = rf"(\.(relaxed|acquire|release|acq_rel)|{_SCOPE}|\.global|{_SHARED}){{0,3}}"
_REDUCED = rf"(\.(relaxed|release)|{_SCOPE}|\.global|{_SHARED}){{0,3}}"
_HALF = r"\.(f16|f16x2|bf16|bf16x2)"
_SUMS = (
    r"\.(and|or|xor)HINT\.b(32|64)|\.addHINT\.([us](32|64)|f(32|64))|\.(inc|dec)HINT\.u32|"
    rf"\.(min|max)HINT\.[us](32|64)|\.(add|min|max)\.noftzHINT(\.v[248])?{_HALF}|"
    r"\.addHINT\.v[24]\.f32"
).replace("HINT", _HINT)
_TENSOR = r"\.tensor\.[1-5]d"
_GROUP = r"\.cta_group::[12]"
_EIGHT = r"\.(e4m3|e5m2|e3m2|e2m3|e2m1)"
_TRANSPOSED = r"\.(row|col)\.(row|col)"
_ALIGNED = r"\.sync\.aligned"
_MMA_KINDS = (
    rf"(\.(f16|f32){_HALF}{_HALF}\.(f16|f32)|\.f32\.(bf16\.bf16|tf32\.tf32)\.f32|"
    rf"\.(f16|f32){_EIGHT}{_EIGHT}\.(f16|f32)|(\.satfinite)?\.s32\.[us][84]\.[us][84]\.s32|"
    r"\.s32\.[us][84]\.[us][84]\.s32(\.satfinite)?|\.f64\.f64\.f64\.f64(\.r[nzmp])?|"
    r"\.s32\.b1\.b1\.s32\.(xor|and)\.popc)"
)
_COLLECTED = r"(\.collector::(a|b[0-3])(::(discard|fill|use|lastuse))?){0,2}(\.ashift)?"
_MMA_KIND = (
    r"\.kind::(f16|tf32|f8f6f4|i8)|\.kind::mx(f4|f4nvf4|f8f6f4)\.block_scale"
    r"(\.scale_vec::[124]X|\.block(16|32))?"
)
_SHAPE = r"\.(32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(1|2|4|8|16|32|64|128)"
_VIDEO = r"(\.[us]32){2,3}(\.sat)?(\.(add|min|max|eq|ne|lt|le|gt|ge|clamp|wrap))*"

BEYOND = {
    "atom": rf"{_ATOMIC}({_SUMS}|\.exch{_HINT}\.b(32|64|128)|\.cas{_HINT}\.b(16|32|64|128))",
    "red": rf"{_REDUCED}({_SUMS})",
    "call": r"(\.uni)?",
    "st.async": rf"\.async(\.weak)?{_BYTES_OF}(\.v[24])?\.([bus](32|64)|f(32|64))|"
    rf"\.async(\.mmio)?\.release{_SCOPE}(\.global)?\.([bus](8|16|32|64)|f(32|64))",
    "red.async": rf"\.async\.relaxed\.cluster{_BYTES_OF}\.(inc|dec|min|max|add|and|or|xor)"
    rf"\.[bus](32|64)|\.async(\.mmio)?\.release{_SCOPE}(\.global)?\.add\.[us](32|64)",
    "cp.async": r"\.async\.(c[ag]\.shared(::cta)?\.global(\.L2::cache_hint)?(\.L2::(64|128|256)B)?|"
    rf"commit_group|wait_group|wait_all|mbarrier\.arrive(\.noinc)?(\.shared(::cta)?)?\.b64|{_BULK})",
    "cp.reduce": r"\.reduce\.async\.bulk("
    rf"\.shared::cluster\.shared::cta{_BYTES}\.(and|or|xor|add|inc|dec|min|max)\.[bus](32|64)|"
    rf"\.global\.shared::cta\.bulk_group{_HINT}\.(and|or|xor|add|inc|dec|min|max)(\.noftz)?"
    r"\.(b(32|64)|[us](32|64)|f(16|32|64)|bf16)|"
    rf"{_TENSOR}\.global\.shared::cta\.(add|min|max|inc|dec|and|or|xor)(\.(tile|im2col_no_offs))?"
    rf"\.bulk_group{_HINT})",
    "cvt": r"\.rn\.b?f16\.ue8m0",
    "fma": r"\.r[zmp](\.relu)?\.bf16(x2)?",
    "fence": r"\.proxy\.async::generic\.(acquire|release)\.sync_restrict"
    r"::shared::(cta|cluster)\.cluster",
    "fns": r"\.b32",
    "istypep": r"\.(texref|samplerref|surfref)",
    "ldmatrix": rf"{_ALIGNED}\.m(8|16)n16\.x[124](\.trans)?(\.shared(::cta)?)?"
    r"(\.b8x16\.b[46]x16_p(64|32)|\.b8)",
    "mbarrier": rf"\.(expect|complete)_tx({_SHARED})?(\.relaxed)?({_SCOPE})?\.b64|"
    r"\.arrive(_drop)?\.noComplete(\.(release|relaxed)(\.cta)?)?(\.shared(::cta)?)?\.b64",
    # NOTE: sparsity, kind and shape stand in several orders, by the kind
    "mma": rf"(\.sp(::ordered_metadata)?|{_ALIGNED}|\.kind::\w+|\.block_scale|"
    rf"\.scale_vec::[124]X|\.m(8|16)n8k\d+|{_TRANSPOSED}){{3,8}}{_MMA_KINDS}(\.ue(8m0|4m3))?",
    "multimem": rf"\.(ld_reduce|st|red)(\.async)?(\.bulk)?{_WHERE}"
    rf"(\.bulk_group|{_BYTES})?{_HINT}(\.(add|min|max|and|or|xor))?"
    r"(\.acc::(f16|f32))?(\.noftz)?(\.v[248])?(\.(b|u|s)(32|64)|\.f(32|64)|\.f16(x2)?|"
    r"\.bf16(x2)?|\.e[45]m[23](x4)?)?",
    "stackrestore": r"\.u(32|64)",
    "stacksave": r"\.u(32|64)",
    "tcgen05": rf"\.commit{_GROUP}\.mbarrier::arrive::one(\.shared::cluster)?"
    r"(\.multicast::cluster)?\.b64|"
    rf"\.cp{_GROUP}\.(128x256b|4x256b|128x128b|64x128b\.warpx2::(02_13|01_23)|32x128b\.warpx4)"
    r"(\.b8x16\.b(4x16_p64|6x16_p32))?|"
    rf"\.mma(\.sp)?(\.ws)?(\.sp)?{_GROUP}({_MMA_KIND}){_COLLECTED}|"
    rf"\.shift{_GROUP}\.down|"
    rf"\.ld\.red{_ALIGNED}{_SHAPE}\.([us]32\.(min|max)|f32\.(min|max)(\.abs)?(\.NaN)?)|"
    rf"\.ld\.red{_ALIGNED}{_SHAPE}\.(min|max)(\.abs)?(\.NaN)?\.([us]32|f32)",
    "tensormap": r"\.replace\.tile\.\w+(\.(global|shared(::cta)?))?\.b1024\.b(32|64)",
    "tex": r"(\.base|\.level|\.grad)?\.(1d|2d|3d|a1d|a2d|cube|acube|2dms|a2dms)(\.v[24])?"
    r"\.(u32|s32|f32|f16|f16x2)\.(s32|f32)",
    "tld4": r"\.[rgba]\.(2d|a2d|cube|acube)\.v4\.(u32|s32|f32)\.f32",
    "txq": r"(\.level)?\.\w+\.b32",
    "suld": r"\.b\.(1d|2d|3d|a1d|a2d)(\.\w+)*(\.v[24])?\.b(8|16|32|64)(\.(trap|clamp|zero))?",
    "sust": r"\.[bp]\.(1d|2d|3d|a1d|a2d)(\.\w+)*(\.v[24])?\.(b(8|16|32|64)|[us]32|f32)(\.\w+)?",
    "sured": r"\.[bp]\.(add|min|max|and|or)\.(1d|2d|3d|a1d|a2d)\.\w+(\.(trap|clamp|zero))?",
    "suq": r"\.\w+\.b32",
    "alloca": r"\.u(32|64)",
    "brkpt": r"",
    "brx": r"\.idx(\.uni)?",
    "vadd vsub vabsdiff vmin vmax vset": _VIDEO,
    "vshl vshr": r"\.[us]32\.[us]32\.u32(\.sat)?(\.(clamp|wrap))?(\.(add|min|max))?",
    "vmad": r"\.[us]32\.[us]32\.[us]32(\.po)?(\.sat)?(\.shr(7|15))?",
    "vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vset2 vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4 vset4":
        rf"{_VIDEO}",
    "wgmma": rf"\.mma_async(\.sp)?{_ALIGNED}\.m64n\d+k(8|16|32|64|256)("
    rf"(\.(f16|f32)(\.f16\.f16|{_EIGHT}{_EIGHT})|\.f32(\.bf16\.bf16|\.tf32\.tf32))|"
    r"\.s32\.[us]8\.[us]8(\.satfinite)?|(\.satfinite)?\.s32\.[us]8\.[us]8|"
    r"\.s32\.b1\.b1\.(and|xor)\.popc|\.s32\.b1\.b1\.and\.popc)",
    "wmma": rf"\.(load|store|mma)(\.[abcd])?(\.(xor|and)\.popc)?{_ALIGNED}(\.(row|col)){{0,2}}"
    r"\.m\d+n\d+k\d+(\.(row|col)){0,2}(\.(global|shared(::cta)?))?(\.\w+){1,4}",
}  # fmt: skip


_TYPE = re.compile(r"\.(pred|[bus]\d+|b?f\d+(x2)?|tf32|u?e\dm\d(x[24])?|s2f6x2)")

NO_NAME = "no instruction of that name"
# of each of these an access, an atomic or an mma has one at most
_ONE_OF = (
    r"\.(weak|volatile|relaxed|acquire|release|acq_rel)",
    _SCOPE,
    rf"\.(global|local|const|param(::entry|::func)?)|{_SHARED}",
    r"\.(ca|cg|cs|lu|cv|wb|wt)",
    r"\.nc",
    r"\.m\d+n\d+k\d+",
)
_OF_ONE_SPACE = ("atom", "ld", "mma", "prefetch", "red", "st")
# opcodes whose forms for their definitions say little, as these check the modifiers themselves
_STRICT = ("cp.async", "st.async", "red.async")


@cache
def _patterns() -> dict[str, re.Pattern[str]]:
    return {name: re.compile(form) for names, form in BEYOND.items() for name in names.split()}


@lru_cache(maxsize=4096)
def nonexistent(op: str) -> str:
    """What is wrong with an opcode that the PTX ISA does not have; "" if it has it."""
    parts = opcode_parts(op)
    name, two = parts[0], ".".join(parts[:2])
    beyond = _patterns().get(two) or _patterns().get(name)
    if name in BRANCHES:
        return ""
    if not has_form(op) and beyond is None:
        return NO_NAME
    runs = has_form(op) and two not in _STRICT
    modifiers = re.findall(r"\.\w+(?:::\w+)*", op.removeprefix(name))
    if name in _OF_ONE_SPACE and two not in _STRICT and (doubled := _doubled(modifiers)):
        return doubled
    if runs and not misfit(op):
        return ""
    for order in _reordered(modifiers):
        text = "".join(order)
        other = f"{name}{text}"
        if runs and has_form(other) and not misfit(other):
            return ""
        if beyond is not None and beyond.fullmatch(text):
            return ""
    return misfit(op) if runs else _first_unknown(op, name, beyond)


def _doubled(modifiers: list[str]) -> str:
    """Two modifiers of a kind of which there can be one; "" if there are none."""
    for kind in _ONE_OF:
        found = [m for m in modifiers if re.fullmatch(kind, m)]
        if len(found) > 1:
            return f"modifiers {' and '.join(found)}"
    return ""


def _reordered(modifiers: list[str]) -> Iterator[list[str]]:
    """`modifiers`, and with one or two of them elsewhere: NVIDIA's assembler does not mind, but for
    the order of types."""
    yield modifiers
    for once in _moved(modifiers):
        yield from _moved(once)


def _moved(modifiers: list[str]) -> Iterator[list[str]]:
    for i, one in enumerate(modifiers):
        if _TYPE.fullmatch(one):
            continue
        rest = modifiers[:i] + modifiers[i + 1 :]
        for at in range(len(modifiers)):
            if at != i:
                yield [*rest[:at], one, *rest[at:]]
    yield modifiers


def _first_unknown(op: str, name: str, form: re.Pattern[str] | None) -> str:
    """The modifier without which `op` would be an instruction, if there is one."""
    parts = re.findall(r"(?:\.|::)\w+", op.removeprefix(name))
    for i, part in enumerate(parts):
        if form is not None and form.fullmatch("".join(parts[:i] + parts[i + 1 :])):
            return f"modifier {part}"
    return "the modifiers, or their order"
