"""PTX that a run never reaches is checked too: what does not exist is an error with its line, what
only the simulator lacks an advisory."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from ptx_kernel import Shape, module, simulate_ptx
from test_broken_ptx import BODIES, SHAPE, WORDS, told

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.sim import Hazards, UnknownInstruction
from cutex.sim.isa import definitions  # noqa: F401 - registers them
from cutex.sim.ptx.decode import _DEFINITIONS
from cutex.sim.ptx.forms import FORMS, opcode_parts
from cutex.sim.ptx.parse import parse
from cutex.sim.ptx.vocabulary import BEYOND, nonexistent

OUT = {"out": np.zeros(32, np.uint32)}
UNREACHED = "mov.u32 %r0, 1; bra END; {} END: st.global.u32 [%out_i], %r0;"


@pytest.mark.parametrize(
    "statement",
    [
        "add.zzz.u32 %r1, %r1, %r1;",
        "frobnicate.u32 %r1, %r1;",
        "add.release.u32 %r1, %r1, %r1;",
        "ld.global.u24 %r1, [%out];",
        "atom.global.nand.b32 %r1, [%out], 1;",
        "red.global.add.u16 [%out], %h1;",
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.s8 {%r1}, %d0, %d1, 1, 1, 1, 0, 0;",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.zzz.f32 {%r1}, {%r1}, {%r1}, {%r1};",
        "tcgen05.mma.cta_group::3.kind::f16 [%r1], %d0, %d1, %r2, %p0;",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::two.shared::cluster.b64 [%r1];",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_rx::bytes [%r1], [%out],"
        " 16, [%r2];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.div.u32 [%out], [%r1], 16;",
        "tensormap.replace.tile.rank.global.b512.b32 [%out], 1;",
        "fence.acq_rel.warp;",
        "barrier.cluster.arrive.aligned.aligned;",
        "shfl.idx.b32 %r1, %r1, 0, 31;",
    ],
)
def test_what_does_not_exist_is_an_error_before_the_run(statement):
    op = re.escape(statement.split()[0].rstrip(";"))
    line = rf"unknown instruction {op}: the simulator does not define .*, nor has the PTX ISA"
    with pytest.raises(UnknownInstruction, match=rf"{line}(.|\n)*at PTX line \d+: ") as error:
        simulate_ptx(UNREACHED.format(statement), OUT, assembles=False)
    assert statement[:18] in str(error.value)


def test_races_are_looked_for_in_a_kernel_with_a_multimem_that_no_run_reaches():
    text = UNREACHED.format("multimem.red.relaxed.sys.global.add.u32 [%out], 1;")
    with pytest.raises(Hazards, match="race: "):
        simulate_ptx("st.global.u32 [%out], %i;" + text, {"out": np.zeros(64, np.uint32)}, Shape(2))


@pytest.mark.parametrize(
    "statement",
    [
        "tex.2d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [%d0, {%r5, %r6}];",
        "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1, %r2}, [%out], 16;",
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4},"
        " {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, %r5, 0;",
        "vadd2.s32.s32.s32 %r1, %r2, %r3, %r4;",
        "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%r1, %r2, %r3, %r4}, [%out];",
        "rcp.rm.f64 %d0, %d1;",
    ],
)
def test_what_the_simulator_lacks_is_an_advisory_where_it_is_not_reached(statement):
    out = np.zeros(32, np.uint32)
    report = simulate_ptx(UNREACHED.format(statement), {"out": out}, assembles=False)
    assert (out == 1).all()
    (advisory,) = report.advisories
    assert advisory.rule == "unknown instruction"
    assert "is not reached by this run" in advisory.message and "PTX line" in advisory.where
    with pytest.raises(UnknownInstruction, match="PTX line"):
        simulate_ptx(UNREACHED.replace("bra END;", "").format(statement), OUT, assembles=False)


@pytest.mark.parametrize(
    "statement",
    [
        "add.u32 %r1, %r1;",
        "add.u32 %d0, %r1, %r1;",
        "mov.u32 %r1, [%r2];",
        "st.global.u32 [%out], {%r1, %r2};",
        "st.global.v4.u32 [%out], {%r1, %r2};",
        "ld.global.v2.u32 %r1, [%out];",
        ".reg .f32 f; mov.u32 %r1, f;",
        ".reg .s32 s; add.rn.f32 %r1, %r1, s;",
        ".reg .u64 u; mov.f64 u, %d0;",
        ".reg .f32 f; cvt.rn.f32.u32 %r1, f;",
        ".reg .f32 f; st.global.u32 [%out], f;",
        ".reg .f64 f; ld.global.u32 %r1, [f];",
        ".shared .b32 s; ld.global.u32 %r1, [s];",
        "ld.shared.u32 %r1, [p_out];",
    ],
)
def test_malformed_operands_are_an_error_where_they_are_not_reached(statement):
    with pytest.raises(UnknownInstruction, match="PTX line"):
        simulate_ptx(UNREACHED.format(statement), OUT, assembles=False)


def test_untyped_bits_go_with_every_type():
    right = ".reg .f32 f; .reg .u32 u; mov.b32 f, u; and.b32 f, f, u; mov.f32 f, %r1;"
    more = ".shared .b32 s; ld.shared.u32 %r1, [s]; ld.u32 %r1, [s]; mov.u32 %r1, s;"
    assert not simulate_ptx(UNREACHED.format(right + more), OUT).advisories


def test_an_instruction_that_is_known_is_told_of_nothing():
    report = simulate_ptx(UNREACHED.format("ex2.approx.ftz.f32 %r1, %r2;"), OUT)
    assert not report.advisories


def test_every_definition_and_every_form_is_of_a_known_name():
    for name in _DEFINITIONS:
        assert nonexistent(f"{name}.zzz") not in ("", "no instruction of that name")
    assert nonexistent("zzz") == "no instruction of that name"
    assert not set(FORMS) & {"tex", "wmma"} and {"tex", "wmma"} <= set(BEYOND)


@pytest.mark.parametrize(("arch", "number"), [("sm_90a", 8), ("sm_100a", 6)])
def test_what_ptxas_has_taken_is_never_refused(arch, number, monkeypatch):
    """A compiled kernel whose text the cubin holds is valid, whatever the tables here say."""
    compiled = compile(stage(arch, number).kernel(), "bf16", arch)
    (program,) = parse(compiled.ptx, compiled.cubin).values()
    assert program.assembled
    assert not {ins.op: wrong for ins in program.code if (wrong := nonexistent(ins.op))}
    changed = compiled.ptx.replace("ret;", "frobnicate.b32 %r1;\nret;")
    with pytest.raises(UnknownInstruction, match="PTX line"):
        parse(changed, compiled.cubin)
    monkeypatch.setattr("cutex.sim.ptx.parse.nonexistent", lambda op: "everything")
    parse(compiled.ptx, compiled.cubin)


# ---- what goes together: each line is as ptxas of CUDA 13.0 takes or refuses it for sm_100a

TAKEN = """
cvt.rn.f32.u32 cvt.rzi.sat.u8.f16 cvt.rni.ftz.sat.s64.f32 cvt.rmi.u16.bf16 cvt.f64.f16
cvt.ftz.f32.f16 cvt.f32.bf16 cvt.rn.bf16.f64 cvt.rp.ftz.f16.f32 cvt.rz.relu.satfinite.bf16.f32
cvt.rpi.f64.f64 cvt.bf16.f16 cvt.rz.f16x2.f32 cvt.rna.satfinite.tf32.f32 cvt.sat.u8.s32
cvt.rn.relu.f16x2.e3m2x2 cvt.rn.satfinite.relu.e2m3x2.f32 cvt.rp.ue8m0x2.bf16x2 cvt.s16.u64
fma.rz.ftz.sat.f32 fma.rn.f64 fma.rn.ftz.f32x2 fma.rn.relu.bf16x2 fma.rz.bf16 fma.rm.f32.f16
mad.rp.f64 mad.rn.ftz.f32 add.bf16 add.rn.ftz.sat.f16 mul.rz.ftz.f32x2 sub.f64 mov.s16 mov.b128
ld.global.cg.u32 ld.relaxed.gpu.global.L1::evict_last.u32 ld.global.acquire.gpu.u32
ld.volatile.shared.u32 ld.param.cg.u64 ld.global.L2::128B.u32 ld.global.v8.u32 ld.const.u32
st.release.sys.u32 st.wt.u32 st.global.L1::no_allocate.u32 st.volatile.u32 st.weak.shared.u32
atom.gpu.relaxed.global.add.u32 atom.acquire.cta.global.add.u32 red.release.cluster.global.add.u32
"""
REFUSED = """
cvt.f32.u32 cvt.u32.f32 cvt.rn.u32.f32 cvt.rni.f32.u32 cvt.rzi.u8.bf16 cvt.rni.ftz.u32.bf16
cvt.rn.f64.f16 cvt.rn.f32.f16 cvt.f16.f32 cvt.rm.relu.f16.f32 cvt.rn.ftz.bf16.f64 cvt.f32.f64
cvt.rn.f64.f64 cvt.f16x2.f32 cvt.rm.f16x2.f32 cvt.rna.f16x2.f32 cvt.rp.tf32.f32 cvt.rn.sat.bf16.u16
cvt.rz.f16x2.e4m3x2 cvt.rn.e4m3x2.f32 cvt.rn.ue8m0x2.f32 cvt.rn.satfinite.f16.u32 cvt.rn.u8.u16
fma.f32 fma.rn.sat.f64 fma.rn.sat.f32x2 fma.rz.f16 fma.rn.ftz.bf16 fma.f32.bf16
mad.f32 mad.rn.sat.f64 mad.rn.f16 add.rz.bf16 add.sat.f64 add.ftz.bf16x2 mul.sat.f32x2 mov.u8
ld.global.global.u32 ld.global.ca.cg.u32 ld.relaxed.gpu.global.cg.u32 ld.release.gpu.global.u32
ld.shared.L2::128B.u32 ld.volatile.const.u32 ld.global.wb.u32 ld.shared.nc.u32 ld.relaxed.u32
st.acquire.gpu.global.u32 st.const.u32 st.global.ca.u32 st.global.L2::128B.u32 st.volatile.local.u32
atom.global.global.add.u32 atom.weak.global.add.u32 atom.gpu.gpu.global.add.u32
red.acq_rel.gpu.global.add.u32 red.acquire.gpu.global.add.u32 red.global.global.max.u32
atom.relaxed.relaxed.gpu.global.add.u32 mma.sync.aligned.m16n8k8.m16n8k8.row.col.f32.f16.f16.f32
"""


@pytest.mark.parametrize("op", TAKEN.split())
def test_what_goes_together_exists(op):
    assert not nonexistent(op)


@pytest.mark.parametrize("op", REFUSED.split())
def test_what_does_not_go_together_does_not_exist(op):
    assert nonexistent(op)


# ---- declared types and spaces: each as ptxas of CUDA 13.0 takes or refuses it for sm_100a.
# Behind a statement: for each of its operands b, u, s and f of the kinds of registers (.b32, .u32,
# .s32, .f32) that it may be declared as.

DECLARED = """
mov.b32 A, B; busf busf|mov.u32 A, B; bus bus|mov.f32 A, B; bf bf|mov.f64 A, B; bf bf
mov.b64 A, B; busf busf|mov.s64 A, B; bus bus|add.u16 A, B, C; bus bus bus
and.b32 A, B, C; busf busf busf|shl.b32 A, B, 3; busf busf|selp.b64 A, B, C, p; busf busf busf
selp.u32 A, B, C, p; bus bus bus|selp.f32 A, B, C, p; bf bf bf|setp.lt.u32 p, A, B; bus bus
setp.eq.b32 p, A, B; busf busf|setp.lt.f64 p, A, B; bf bf|ld.global.b32 A, [a]; busf
ld.global.u32 A, [a]; bus|st.global.f32 [a], A; bf|st.global.v2.f32 [a], {A, A}; busf
ld.global.f64 A, [a]; bf|add.f32 A, B, C; bf bf bf|neg.f64 A, B; bf bf|add.f16 A, B, C; bf bf bf
add.bf16 A, B, C; b b b|add.f16x2 A, B, C; b b b|atom.global.add.u32 A, [a], B; bus bus
atom.global.add.f32 A, [a], B; bf bf|cvt.rn.f32.u32 A, B; bf bus|cvt.rzi.u32.f32 A, B; bus bf
cvt.rn.bf16x2.f32 A, B, C; b bf bf|cvt.f64.f32 A, B; bf bf|mul.wide.u32 A, B, C; bus bus bus
shr.s32 A, B, C; bus bus bus|bfe.u32 A, B, C, C; bus bus bus|ex2.approx.f32 A, B; bf bf
shfl.sync.idx.b32 A, B, C, 31, -1; busf busf busf|prmt.b32 A, B, C, C; busf busf busf
ld.global.u32 R, [A]; bus|st.shared.u32 [A], R; bus
"""


def declared_as(statement: str, place: int, kind: str) -> str:
    """The statement with one of its registers declared as `kind`, the others with bit types."""
    names = re.findall(r"\b[ABC]\b", statement)
    letter = sorted(set(names))[place]
    wide = {"mul.wide.u32": "A", "cvt.f64.f32": "A", "ld.global.u32 R": "A"}
    sixteen = re.match(r"\w+\.(u16|f16|bf16) ", statement)
    bits = 16 if sixteen else 64 if re.match(r"\w+(\.\w+)*?\.[busf]64 ", statement) else 32
    only = next((x for name, x in wide.items() if statement.startswith(name)), "")
    declared = []
    for x in "ABC":
        width = (64 if x == only else 32) if only else bits
        declared.append(f".reg .{kind if x == letter else 'b'}{width} {x};")
    return f"{' '.join(declared)} .reg .pred p; .reg .b32 R; .reg .b64 a; {statement}"


def kinds_of_registers():
    for line in re.split(r"[|\n]", DECLARED.strip()):
        statement, _, taken = line.rpartition(";")
        for place, kinds in enumerate(taken.split()):
            for kind in "busf":
                yield statement + ";", place, kind, kind in kinds


SPACES = {  # of variables in each space, those that an address may name
    "ld.u32 %r1, [X];": "shared global local",
    "ld.global.u32 %r1, [X];": "global",
    "ld.shared::cta.u32 %r1, [X];": "shared",
    "ld.const.u32 %r1, [X];": "const",
    "ld.local.u32 %r1, [X];": "local",
    "ld.param.u32 %r1, [X];": "param",
    "st.u32 [X], %r1;": "shared global local",
    "st.shared.u32 [X], %r1;": "shared",
    "st.global.u32 [X], %r1;": "global",
    "atom.add.u32 %r1, [X], 1;": "shared global",
    "atom.global.add.u32 %r1, [X], 1;": "global",
    "red.shared.add.u32 [X], 1;": "shared",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [X];": "shared",
    "prefetch.global.L2 [X];": "global",
}


def is_read(body: str, head: str = "") -> bool:
    """Whether a module is, of which no run reaches `body`."""
    arrays = {"out": np.zeros(32, np.uint32)}
    try:
        simulate_ptx(UNREACHED.format(body), arrays, head=head, arch="sm_100a", assembles=False)
    except UnknownInstruction as error:
        assert "PTX line" in str(error)
        return False
    return True


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 9))]
)
def test_registers_are_taken_as_the_assembler_takes_their_types(part):
    cases = [*kinds_of_registers()]
    assert len(cases) > 300
    for statement, place, kind, taken in cases[part::9]:
        body = f"{{ {declared_as(statement, place, kind)} }}"
        assert is_read(body) == taken, (statement, place, kind)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("statement", SPACES)
def test_variables_are_taken_as_the_assembler_takes_their_spaces(statement):
    head = "\n".join(
        f".{space} .align 16 .b8 of_{space}[64];" for space in ("shared", "global", "const")
    )
    for space in ("shared", "global", "const", "local", "param"):
        name = "p_out" if space == "param" else f"of_{space}"
        body = f"{{ .local .align 16 .b8 of_local[64]; {statement.replace('X', name)} }}"
        assert is_read(body, head) == (space in SPACES[statement].split()), space


# ---- mutated texts


def opcodes(text: str) -> list[re.Match[str]]:
    body = text.index("{", text.index(".entry"))
    found = re.finditer(r"(?<![\w.%:])[a-z]\w*(?:(?:\.|::)\w+)+(?=[\s;])", text)
    return [m for m in found if m.start() > body]


def with_another_modifier(text: str, choose: random.Random) -> tuple[str, str]:
    """The text with one modifier of one opcode dropped, doubled or exchanged, and the opcode."""
    m = choose.choice(opcodes(text))
    parts = re.findall(r"(?:\.|::)?\w+", m.group())
    at = choose.randrange(1, len(parts))
    match choose.randrange(4):
        case 0:
            parts.pop(at)
        case 1:
            parts.insert(at, parts[at])
        case 2:
            parts[at] = "." + choose.choice(WORDS)
        case _:
            parts.insert(at, "." + choose.choice([*WORDS, "zzz"]))
    op = "".join(parts)
    return text[: m.start()] + op + text[m.end() :], op


def unreached(body: str) -> str:
    """A kernel that never comes to `body`."""
    body = re.sub(r"\.reg \.b(32|64) (\w+);", r"", body)
    declared = "".join(re.findall(r"\.reg \.b\d+ \w+;", body))
    return f"{declared} bra.uni OVER; {body} OVER: mov.u32 %r0, 0;"


def test_mutated_modifiers_in_code_that_never_runs_are_told():
    """Of 300 texts with a changed modifier, each is told, or is an instruction that exists."""
    choose = random.Random(8)
    modules = [
        module(unreached(body), {"a": np.zeros(64, np.uint32)}, SHAPE, "sm_90a", "")
        for body in BODIES
        if ".reg" not in body and "{ " not in body
    ]
    for text in modules:
        assert told(text) == "right", text
    verdicts: dict[str, int] = {}
    for _ in range(300):
        text, op = with_another_modifier(choose.choice(modules), choose)
        verdict = told(text)
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        assert verdict == "UnknownInstruction" or not nonexistent(op), op
    assert verdicts["UnknownInstruction"] > 150, verdicts
    assert verdicts["right"] < 100, verdicts


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_modifier_that_no_instruction_has_is_told_of_every_opcode_of_a_kernel(arch):
    compiled = compile(stage(arch, 4).kernel(), "bf16", arch)
    seen = set()
    for m in opcodes(compiled.ptx):
        if m.group() in seen:
            continue
        seen.add(m.group())
        for at in range(1, len(opcode_parts(m.group()))):
            parts = re.findall(r"(?:\.|::)?\w+", m.group())
            parts.insert(at, ".zzz")
            text = compiled.ptx[: m.start()] + "".join(parts) + compiled.ptx[m.end() :]
            with pytest.raises(UnknownInstruction, match=r"zzz|any such"):
                parse(text)
    assert len(seen) > 30
