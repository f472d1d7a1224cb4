"""A product and an addition without rounding modifiers are fused where ptxas fuses them."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from cutlass import cute
from ptx_kernel import Shape, module, simulate_ptx

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.sim import simulate
from cutex.sim.ptx.contraction import contract
from cutex.sim.ptx.parse import parse
from cutex.sim.ptx.sass_lines import ADD, FMA, MUL, sass_lines
from cutex.sim.timing.machine_code import disassemble

FLOATS = {"f32": np.float32, "f64": np.float64, "f16": np.float16}


def rounded(value: Fraction, kind: str) -> float:
    """`value` rounded once to a type of normal range; float() of a fraction rounds correctly."""
    if kind == "f64":
        return float(value)
    near = FLOATS[kind](float(value))  # double rounding is mended by the candidates beside it
    around = [
        near,
        np.nextafter(near, FLOATS[kind](np.inf)),
        np.nextafter(near, -FLOATS[kind](np.inf)),
    ]
    return float(
        min(
            around,
            key=lambda c: (
                abs(Fraction(float(c)) - value),
                int(np.array(c).view(f"u{c.itemsize}")) & 1,
            ),
        )
    )


def difference_of_products(execute, kind: str, rn: str = "") -> tuple[np.ndarray, np.ndarray]:
    """x*s - x*s computed by a kernel, and the rounding error of the product."""
    dtype, bits = FLOATS[kind], {"f16": 16, "f32": 32, "f64": 64}[kind]
    bank = {16: "h", 32: "r", 64: "d"}[bits]
    rng = np.random.default_rng()
    x = (rng.standard_normal(32) * (1e9 if bits > 16 else 10)).astype(dtype)
    y = (rng.standard_normal(32) + 3).astype(dtype)
    out = np.full(32, np.nan, dtype)
    regs = [f"%{bank}{i + 1}" for i in range(5)]
    body = f"""ld.global.b{bits} {regs[0]}, [%x_i]; ld.global.b{bits} {regs[1]}, [%y_i];
    mul{rn}.{kind} {regs[2]}, {regs[0]}, {regs[1]};
    mul.rn.{kind} {regs[3]}, {regs[0]}, {regs[1]};
    sub.{kind} {regs[4]}, {regs[2]}, {regs[3]}; st.global.b{bits} [%out_i], {regs[4]};"""
    execute(body, {"x": x, "y": y, "out": out})
    exact = [Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x, y, strict=True)]
    residue = [rounded(p - Fraction(rounded(p, kind)), kind) for p in exact]
    return out, np.array(residue, dtype)


@pytest.mark.parametrize("kind", FLOATS)
def test_a_product_fused_with_a_subtraction_is_not_rounded(execute, kind):
    got, residue = difference_of_products(execute, kind)
    assert (residue != 0).sum() > 20
    np.testing.assert_array_equal(got, residue)


@pytest.mark.parametrize("kind", FLOATS)
def test_a_product_with_a_rounding_modifier_is_never_fused(execute, kind):
    got, _ = difference_of_products(execute, kind, ".rn")
    assert (got == 0).all()


FORMS = {  # the addition of a product to %r3, and whether it becomes an FMA
    "mul.f32 %r4, %r1, %r2; add.f32 %r5, %r4, %r3;": lambda x, y, z: x * y + z,
    "mul.f32 %r4, %r1, %r2; add.f32 %r5, %r3, %r4;": lambda x, y, z: x * y + z,
    "mul.f32 %r4, %r1, %r2; sub.f32 %r5, %r4, %r3;": lambda x, y, z: x * y - z,
    "mul.f32 %r4, %r1, %r2; sub.f32 %r5, %r3, %r4;": lambda x, y, z: z - x * y,
    "mul.f32 %r4, %r1, 0f3F8CCCCD; sub.f32 %r5, 0f40490FDB, %r4;": lambda x, y, z: (
        Fraction(float(np.float32(3.1415927))) - x * Fraction(float(np.float32(1.1)))
    ),
}


@pytest.mark.parametrize("body", FORMS)
def test_every_way_to_add_a_product(execute, body):
    rng = np.random.default_rng()
    x, y, z = (rng.standard_normal(32).astype(np.float32) for _ in range(3))
    z = -z if "sub" in body else z
    z = (-(x.astype(np.float64) * y)).astype(np.float32) if "add" in body else z
    out = np.zeros(32, np.float32)
    load = "".join(f"ld.global.f32 %r{i + 1}, [%{n}_i];" for i, n in enumerate("xyz"))
    execute(f"{load} {body} st.global.f32 [%out_i], %r5;", {"x": x, "y": y, "z": z, "out": out})
    exact = [FORMS[body](*(Fraction(float(v)) for v in row)) for row in zip(x, y, z, strict=True)]
    np.testing.assert_array_equal(out, np.array([rounded(e, "f32") for e in exact], np.float32))


PAIRS = {
    "f16x2": ("mul.f16x2 %r4, %r1, %r2; sub.f16x2 %r5, %r4, %r3;", np.float16),
    "f32x2": ("mul.f32x2 %d4, %d1, %d2; sub.f32x2 %d5, %d4, %d3;", np.float32),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_both_halves_of_a_pair_are_fused(kind):
    body, dtype = PAIRS[kind]
    rng = np.random.default_rng()
    x, y = (rng.standard_normal((32, 2)).astype(dtype) for _ in range(2))
    z = (x.astype(np.float64) * y).astype(dtype)
    out = np.zeros((32, 2), dtype)
    bank = "d" if kind == "f32x2" else "r"
    bits = 64 if kind == "f32x2" else 32
    load = "".join(f"ld.global.b{bits} %{bank}{i + 1}, [%{n}_i];" for i, n in enumerate("xyz"))
    arrays = {"x": x, "y": y, "z": z, "out": out}
    simulate_ptx(f"{load} {body} st.global.b{bits} [%out_i], %{bank}5;", arrays, arch="sm_100a")
    exact = [
        rounded(
            Fraction(float(a)) * Fraction(float(b)) - Fraction(float(c)),
            np.dtype(dtype).name.replace("float", "f"),
        )
        for a, b, c in zip(x.ravel(), y.ravel(), z.ravel(), strict=True)
    ]
    np.testing.assert_array_equal(out.ravel(), np.array(exact, dtype))
    assert out.any()


NOT_FUSED = [
    "mul.rn.f32 %r4, %r1, %r2; add.f32 %r5, %r4, %r3;",
    "mul.f32 %r4, %r1, %r2; add.rn.f32 %r5, %r4, %r3;",
    "mul.sat.f32 %r4, %r1, %r2; add.f32 %r5, %r4, %r3;",
    "mul.f32 %r4, %r1, %r2; add.ftz.f32 %r5, %r4, %r3;",
    "mul.f32 %r4, %r1, %r2; mov.b32 %r1, %r3; mov.b32 %r1, %r2; add.f32 %r5, %r1, %r4;"
    "st.global.f32 [%out_i], %r4;",
    "mul.f32 %r4, %r1, %r2; add.f32 %r5, %r4, %r4;",
    "mul.f32 %r4, %r1, %r2; setp.gt.f32 %p0, %r1, 0f00000000; @%p0 bra A; mov.b32 %r3, %r1;"
    "A: add.f32 %r5, %r4, %r3;",
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("body", NOT_FUSED)
def test_what_the_assembler_does_not_fuse_stays(body):
    text = module(body, {"out": np.zeros(32, np.float32)}, Shape(), "sm_90a", "")
    assert not [i for i in parse(text)["snippet"].code if i.name == "fma"]


def test_the_machine_code_decides():
    """Where the cubin has an FADD, the addition stays one, whatever else would be expected."""
    text = module(next(iter(FORMS)), {"out": np.zeros(32, np.float32)}, Shape(), "sm_90a", "")
    (line,) = (i.line for i in parse(text)["snippet"].code if i.name == "fma")
    for made, name in ((ADD, "add"), (FMA, "fma")):
        code = _parsed_without_contraction(text)
        contract(code, {line: frozenset({made, MUL})})
        assert [i.name for i in code if i.name in ("add", "fma")] == [name]


def _parsed_without_contraction(text: str):
    module_ = sys.modules["cutex.sim.ptx.parse"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_, "contract", lambda code, lines: None)
        return module_.parse(text)["snippet"].code


# ---- against the machine code of kernels


def kinds(opcode: str) -> str:
    for kind, heads in {
        FMA: ("FFMA", "DFMA", "HFMA2"),
        ADD: ("FADD", "DADD", "HADD2"),
        MUL: ("FMUL", "DMUL", "HMUL2"),
    }.items():
        if opcode.startswith(heads):
            return kind
    return "other"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("arch", "number"), [("sm_90a", 7), ("sm_100a", 6)])
def test_the_lines_of_machine_code_are_those_of_the_disassembler(arch, number):
    compiled = compile(stage(arch, number).kernel(), "bf16", arch)
    want: dict[int, set[str]] = {}
    for ins in disassemble(compiled.cubin):
        if ins.opcode != "NOP":
            want.setdefault(ins.line, set()).add(kinds(ins.opcode))
    (got,) = sass_lines(compiled.cubin).values()
    assert {line: set(what) for line, what in got.items()} == want


@cute.kernel
def kernel(x: cute.Tensor, s: cute.Tensor, out: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    out[t] = x[t] * s[t] - x[31 - t] * s[t]


@cute.jit
def launch(x: cute.Tensor, s: cute.Tensor, out: cute.Tensor):
    kernel(x, s, out).launch(grid=(1, 1, 1), block=(32, 1, 1))


def test_a_compiled_kernel_gives_what_its_machine_code_gives():
    """x * s - m * s in the DSL, whose residue a separate multiplication would not have."""
    x = torch.randn(16) * 1e9
    x = torch.cat([x, x.flip(0)])
    s, out = torch.randn(32), torch.full((32,), float("nan"))
    simulate(launch, x, s, out, arch="sm_90a")
    products = [Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), s.tolist(), strict=True)]
    residue = torch.tensor([rounded(p - Fraction(rounded(p, "f32")), "f32") for p in products])
    assert (residue != 0).sum() > 16
    assert torch.equal(out, residue) or torch.equal(out, -residue)


def random_body(choose: random.Random) -> str:
    """Products and sums of each other in random order, some of them stored."""
    lines = ["ld.global.f32 %r0, [%x_i]; ld.global.f32 %r1, [%y_i]; ld.global.f32 %r2, [%z_i];"]
    values = 3
    for _ in range(choose.randrange(4, 24)):
        x, y = (f"%r{choose.randrange(values)}" for _ in range(2))
        name = choose.choice(["mul", "mul", "mul.rn", "add", "sub", "add.rn"])
        lines.append(f"{name}.f32 %r{values}, {x}, {y};")
        values += 1
    for i in range(values):
        if choose.random() < 0.3 or i == values - 1:
            lines.append(f"st.global.f32 [%out_i+{128 * i}], %r{i};")
    return "\n".join(lines)


def fused_by_ptxas(body: str, ptxas: str, tmp_path, arch: str) -> tuple[str, bytes]:
    arrays = {n: np.zeros(32, np.float32) for n in "xyz"} | {"out": np.zeros((32, 32), np.float32)}
    text = module(body, arrays, Shape(), arch, "")
    source, cubin = tmp_path / "k.ptx", tmp_path / "k.cubin"
    source.write_text(text)
    subprocess.run([ptxas, f"-arch={arch}", "-lineinfo", "-o", cubin, source], check=True)
    return text, cubin.read_bytes()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_taken_to_be_fused_without_machine_code(seed, tmp_path):
    """ptxas's choice on random programs, where there is a ptxas: the habit is right for nine in
    ten additions of a product, and never fuses what may not be."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas in the path")
    body = random_body(random.Random(seed))
    text, cubin = fused_by_ptxas(body, ptxas, tmp_path, "sm_90a")
    lines = sass_lines(cubin)["snippet"]
    with_code = {i.line for i in parse(text, cubin)["snippet"].code if i.name == "fma"}
    made = {line for line, what in lines.items() if FMA in what}
    assert with_code == made  # each FMA of the machine code is an FMA here
    guessed = {i.line for i in parse(text)["snippet"].code if i.name == "fma" and i.line in lines}
    assert len(guessed ^ made) <= 1 + len(made) // 5, re.sub("\n", "; ", body)
