"""Broken PTX is an error of the simulator's own that names the line, never a crash or a guess."""

from __future__ import annotations

import random
import re
import time

import numpy as np
import pytest
from broken_ptx import broken
from ptx_kernel import Shape, module, simulate_ptx

from cutex.debug_info import _MARK, DebugInfo, debug_info_of
from cutex.sim import BadAddress, BadOperand, Deadlock, Endless, SimError, UnknownInstruction
from cutex.sim.host.capture import HostFunction, HostTensor
from cutex.sim.ptx.decode import _DEFINITIONS, Decoder
from cutex.sim.ptx.forms import has_form
from cutex.sim.ptx.operands import Operands
from cutex.sim.ptx.parse import parse
from cutex.sim.ptx.program import Instruction
from cutex.sim.simulation import Simulation

OUT = {"out": np.zeros(32, np.uint32)}
SHAPE = Shape(block=64, smem=4096)
BARRIER = """.reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p0, %i, 0;
@%p0 mbarrier.init.shared::cta.b64 [bar], 1;
@%p0 fence.mbarrier_init.release.cluster; bar.sync 0;"""
BODIES = [
    "add.u32 %r0, %i, 7; mul.lo.s32 %r0, %r0, 3; st.global.u32 [%a_i], %r0;",
    "cvt.rn.f32.u32 %r0, %i; ex2.approx.ftz.f32 %r1, %r0; fma.rn.f32 %r1, %r0, 0f3F800000, %r1;"
    "cvt.rn.bf16x2.f32 %r2, %r1, %r0; st.global.b32 [%a_i], %r2;",
    "setp.lt.and.u32 %p1, %i, 40, %p2; selp.b32 %r0, 1, 0, %p1; @%p1 st.global.u32 [%a_i], %r0;",
    "mov.u32 %r0, 0; LOOP: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, %i; @%p0 bra LOOP;"
    "st.global.u32 [%a_i], %r0;",
    "shl.b32 %r1, %i, 2; mov.u32 %r0, smem; add.u32 %r0, %r0, %r1; st.shared.u32 [%r0], %i;"
    "bar.sync 0; xor.b32 %r0, %r0, 4; ld.shared.u32 %r2, [%r0]; st.global.u32 [%a_i], %r2;",
    "ld.global.v2.u32 {%r0, %r1}, [%a]; mov.b64 %d0, {%r0, %r1}; shr.u64 %d0, %d0, 3;"
    "mov.b64 {%r2, %r3}, %d0; st.global.v2.u32 [%a+8], {%r2, %r3};",
    "shfl.sync.bfly.b32 %r0|%p1, %lane, 1, 31, -1; vote.sync.ballot.b32 %r1, %p1, -1;"
    "redux.sync.add.u32 %r2, %r0, -1; elect.sync %r3|%p2, -1; @%p2 st.global.u32 [%a_i], %r2;",
    "atom.global.add.u32 %r0, [%a], 1; red.global.max.u32 [%a+4], %r0; membar.gl;"
    "fence.acq_rel.gpu; atom.global.cas.b32 %r1, [%a+8], 0, 1;",
    BARRIER + "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256; add.u32 %r1, bar, 128;"
    "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a], 256,"
    " [bar]; W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0; @!%p1 bra W;"
    "shl.b32 %r2, %i, 2; add.u32 %r2, %r2, %r1; ld.shared.u32 %r3, [%r2];"
    "st.global.u32 [%a_i], %r3;",
    "shl.b32 %r1, %i, 4; mov.u32 %r0, smem; add.u32 %r0, %r0, %r1; and.b32 %r1, %r1, 127;"
    ".reg .b64 f; cvt.u64.u32 f, %r1; add.u64 f, f, %a; cp.async.cg.shared.global [%r0], [f], 16;"
    "cp.async.commit_group; cp.async.wait_group 0; ld.shared.u32 %r3, [%r0];"
    "st.global.u32 [%a_i], %r3;",
    "shl.b32 %r1, %lane, 4; mov.u32 %r0, smem; add.u32 %r0, %r0, %r1; bar.sync 0;"
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r0], {%r1, %r1, %lane, %lane}; bar.sync 0;"
    "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r4, %r5}, [%r0];"
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r6, %r7, %r8, %r9}, {%r4, %r5}, {%r4},"
    " {%r1, %r1, %r1, %r1};",
    "{ .reg .b32 t; .shared .align 16 .b8 own[64]; mov.u32 t, own; and.b32 %r1, %i, 15;"
    "mad.lo.u32 t, %r1, 4, t; @%p3 st.shared.u32 [t], %r1; } brev.b32 %r2, %i; popc.b32 %r2, %r2;"
    "prmt.b32 %r2, %r2, %i, 0x5410; lop3.b32 %r2, %r2, %i, 7, 0x96; st.global.u32 [%a_i], %r2;",
]
WORDS = sorted({*re.findall(r"[.:]([a-zA-Z]\w*)", " ".join(BODIES)), "zzz", "sat", "v4", "f64"})
# Warp-instructions after which a broken loop is ended: ten times as many as a right one needs.
LIMIT = 2000


def told(text: str, shape: Shape = SHAPE) -> str:
    """The outcome of a module of one array: "right", "finding" or the name of the simulator's
    error.
    """
    array = np.arange(64, dtype=np.uint32)
    spare = np.zeros(1 << 16, np.uint8)
    tensor = HostTensor.of(array, "a")
    import ctypes

    value = ctypes.c_uint64(tensor.address)
    # NOTE: broken text may ask for more parameters than there are
    params = (ctypes.c_void_p * 65)(ctypes.addressof(value), *[spare.ctypes.data] * 64)
    try:
        run = Simulation(parse(text), [tensor], limit=LIMIT)
        run.launch(shape.launch("snippet", params))
    except SimError as error:
        said = str(error)
        missing = "which is not in the PTX" in said
        assert "PTX line" in said or missing, said
        return type(error).__name__
    return "finding" if run.report.findings else "right"


def texts(count: int, seed: int):
    choose = random.Random(seed)
    modules = [module(body, {"a": np.zeros(64, np.uint32)}, SHAPE, "sm_90a", "") for body in BODIES]
    for text in modules:
        assert told(text) in ("right", "finding"), text
    for _ in range(count):
        yield broken(choose.choice(modules), choose, WORDS)


def all_are_told(count: int, seed: int) -> dict[str, int]:
    verdicts: dict[str, int] = {}
    for text in texts(count, seed):
        start = time.process_time()
        verdict = told(text)
        assert time.process_time() - start < 10, text
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
    return verdicts


def test_broken_texts_are_findings_errors_or_right_runs():
    verdicts = all_are_told(700, 15)
    assert verdicts["UnknownInstruction"] > 300
    assert verdicts["right"] > 50


@pytest.mark.slow
def test_more_broken_texts():
    assert sum(all_are_told(20_000, 16).values()) == 20_000


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_broken_texts_of_compiled_kernels(arch):
    """The host code of stage 0 launches its broken PTX."""
    import torch

    from cutex.compile import compile
    from cutex.kernels.gemm import stage

    compiled = compile(stage(arch, 0).kernel(), "bf16", arch)
    host = HostFunction(compiled.object_path, compiled.symbol)
    choose = random.Random(17)
    words = sorted(set(re.findall(r"[.:]([a-zA-Z]\w*)", compiled.ptx)))
    for _ in range(200):
        text = broken(compiled.ptx, choose, words)
        if ".param" in text.partition("{")[0] and text.partition("{")[0] not in compiled.ptx:
            continue  # a kernel's parameters are the host code's, which is not broken here
        matrices = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3)]
        tensors = [HostTensor.of(x, f"m{i}") for i, x in enumerate(matrices)]
        try:
            run = Simulation(parse(text), tensors, limit=100_000)
            host(tensors, run.launch)
        except SimError as error:
            assert "PTX line" in str(error) or "which is not in the PTX" in str(error)


@pytest.mark.parametrize("text", ["{", '{"frames": [], "calls": [], "smem": []}', "[1, 2]", "{}"])
def test_a_changed_comment_about_the_source_says_nothing(text):
    assert debug_info_of(f"\n{_MARK}{text}\n") == DebugInfo({}, {})


# ---- every token is accounted for


def executed(texts: list[str]) -> list[tuple[str, str]]:
    """(statement, opcode) of all instructions that the bodies execute."""
    found = []
    for body in texts:
        for statement in re.sub(r"\w+:\s", "", body.replace("{ ", "").replace("} ", "")).split(";"):
            m = re.match(r"\s*(?:@!?%p\d\s+)?([a-z][\w.:]*)", statement)
            if m and not statement.strip().startswith("."):
                found.append((statement.strip(), m.group(1)))
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_no_instruction_passes_with_a_modifier_or_an_operand_too_many(body):
    for statement, op in executed([body]):
        if ".try_wait" in op:  # takes a fourth operand: how long it may sleep
            continue
        for wrong in (
            statement.replace(op, f"{op}.zzz", 1),
            f"{statement}, %r9" if statement != op else f"{statement} %r9",
        ):
            text = body.replace(statement, wrong, 1)
            whole = module(text, {"a": np.zeros(64, np.uint32)}, SHAPE, "sm_90a", "")
            assert told(whole) not in ("right", "finding"), wrong


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", sorted(_DEFINITIONS))
def test_every_definition_refuses_a_modifier_that_no_instruction_has(name):
    ins = Instruction(f"{name}.zzz", Operands(), None, False, 1, f"{name}.zzz")
    if has_form(ins.op):
        with pytest.raises(UnknownInstruction):
            from cutex.sim.ptx.decode import decode

            decode(ins, None)
        return
    with pytest.raises((UnknownInstruction, AssertionError, IndexError, StopIteration)):
        d = Decoder(ins, None)
        _DEFINITIONS[name](d)
        d.account()


@pytest.mark.parametrize(
    "statement",
    [
        "fence.zzz;",
        "bra.zzz END; END:",
        "shfl.sync.b32 %r0, %r1, 1, 31, -1;",
        "ret.zzz;",
        "bar 0;",
        "add.u32 %r0, %r1;",
        "add.u32 %r0, %r1, %r2, %r3;",
        "add.u32 %r0, %r1, 1.5;",
        "add.u32 %r0, %d1, 1;",
        "mov.u32 %d0, 1;",
        "mov.b64 %d0, {%r0, %r1, %r2};",
        "ld.global.v4.u32 {%r0, %r1}, [%out];",
        "ld.global %r0, [%out];",
        "setp.eq.u32 %p0, %r0, %r1, %p1;",
        "mov.u32 %r0, 99999999999999999999999;",
        "add.u32 %r0, %r1, 08;",
        ".reg .b32 %r0;  .reg .b32 %r0;",
        ".reg .zzz %q;",
        ".zzz;",
        "X: X: mov.u32 %r0, 0;",
        "mov.u32 %r0, %r1 add.u32 %r0, %r0, 1;",
        "st.global.u32 [%out, 1], %r0;",
        "st.global.u32 [], %r0;",
        "st.global.u32 [%p0], %r0;",
        "@%r0 mov.u32 %r1, 0;",
        "} mov.u32 %r0, 0;",
        "{ mov.u32 %r0, 0;",
    ],
)
def test_what_the_assembler_refuses_is_refused_with_its_line(statement):
    with pytest.raises(UnknownInstruction, match=r"PTX line \d+"):
        simulate_ptx(statement, OUT, assembles=False)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("offset", ["-94040066256720", "0x7fffffffffffff00", "-0x7000000000000000"])
@pytest.mark.parametrize("space", ["global", "shared", "local", ""])
def test_an_address_in_the_top_half_is_a_bad_address(offset, space):
    body = f".local .b8 l[64]; add.u64 %d0, %out, 0; st.{space}.u32 [%d0+{offset}], 1;"
    with pytest.raises(BadAddress, match="PTX line"):
        simulate_ptx(body.replace("st..", "st."), OUT, Shape(smem=64), assembles=False)


def test_an_mbarrier_in_the_top_half_is_a_bad_address():
    body = "mov.u64 %d0, 0xF000000000000400; mbarrier.init.shared.b64 [%d0], 1;"
    with pytest.raises(BadAddress, match="PTX line"):
        simulate_ptx(body, OUT, Shape(smem=64), assembles=False)


def test_an_error_inside_a_definition_names_the_instruction(monkeypatch):
    def fails(d):
        def execute(b):
            raise KeyError("x")

        d.ins.operands[:]
        return execute

    monkeypatch.setitem(_DEFINITIONS, "mov", fails)
    with pytest.raises(BadOperand, match=r"KeyError: 'x'\n +at PTX line \d+: mov.u32"):
        simulate_ptx("nanosleep.u32 1;", OUT)


def test_a_billion_registers_take_no_time():
    start = time.process_time()
    out = np.zeros(32, np.uint32)
    body = ".reg .b32 %q<1000000000>; mov.u32 %q999999999, 5; st.global.u32 [%out_i], %q999999999;"
    simulate_ptx(body, {"out": out}, assembles=False)
    assert (out == 5).all()
    assert time.process_time() - start < 10
    with pytest.raises(UnknownInstruction, match="q1000000000"):
        simulate_ptx(body.replace("%q999999999", "%q1000000000"), OUT, assembles=False)


COUNT = """mov.u32 %r0, 0; LOOP: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, {};
@%p0 bra LOOP; st.global.u32 [%out_i], %r0;"""


@pytest.mark.slow
def test_a_long_loop_is_no_deadlock(monkeypatch):
    """100,000 rounds at a thirtieth of the limit stand for 3,000,000 at the real one."""
    from cutex.sim import scheduler

    monkeypatch.setattr(scheduler, "_ROUNDS", scheduler._ROUNDS // 30)
    monkeypatch.setattr(scheduler, "_PATIENCE", scheduler._PATIENCE // 30)
    out = np.zeros(32, np.uint32)
    simulate_ptx(COUNT.format(100_000), {"out": out})
    assert (out == 100_000).all()


def test_a_loop_without_end_is_called_endless(monkeypatch):
    from cutex.sim import scheduler

    monkeypatch.setattr(scheduler, "_ROUNDS", 1 << 16)
    with pytest.raises(Endless, match=r"65536 rounds of a loop(.|\n)*at PTX line"):
        simulate_ptx(COUNT.format(1 << 31), OUT)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_loop_that_comes_back_to_where_it_was_is_a_deadlock(period):
    body = f"mov.u32 %r0, 0; L: add.u32 %r0, %r0, 1; rem.u32 %r0, %r0, {period}; bra L;"
    with pytest.raises(Deadlock, match="goes round a loop in which nothing changes"):
        simulate_ptx(body, OUT)


def test_a_run_can_be_limited():
    with pytest.raises(Endless, match=r"more than 1000 warp-instructions(.|\n)*at PTX line"):
        from ptx_kernel import module as make

        text = make(COUNT.format(1 << 20), OUT, Shape(), "sm_90a", "")
        import ctypes

        tensor = HostTensor.of(OUT["out"], "out")
        value = ctypes.c_uint64(tensor.address)
        params = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        Simulation(parse(text), [tensor], limit=1000).launch(Shape().launch("snippet", params))
