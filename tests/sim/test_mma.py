"""wgmma against products of small integers, exactly: operands, layouts, accumulators.

Snippets run in the simulator, and on a Hopper GPU where there is one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from barriers import EVERY_ORDER
from operands import FORMATS, Layout, k_of, packed, small_integers
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim.errors import BadOperand, Hazards, UnknownInstruction

FILL = """
mov.u32 %r0, smem;                               // shared memory from s
mov.u32 %r2, %tid.x;
shl.b32 %r2, %r2, 4;
FILLED:
setp.ge.u32 %p1, %r2, {bytes};
@%p1 bra FULL;
add.u32 %r3, %r0, %r2;
cvt.u64.u32 %d0, %r2;
add.u64 %d0, %d0, %s;
ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d0];
st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}};
add.u32 %r2, %r2, 2048;
bra FILLED;
FULL:
fence.proxy.async.shared::cta;
bar.sync 0;
"""


def descriptor_text(register: str, layout: Layout, arch: str) -> str:
    return f"""
        add.u32 %r1, %r0, {layout.start};
        bfe.u32 %r1, %r1, 4, 14;
        cvt.u64.u32 {register}, %r1;
        or.b64 {register}, {register}, {layout.descriptor(arch)};
    """


def d_places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each D value of each of 128 threads: two (128, n / 2) arrays."""
    thread, value = np.arange(128)[:, None], np.arange(n // 2)[None, :]
    t = thread % 32
    row = 16 * (thread // 32) + t // 4 + 8 * (value // 2 % 2)
    return row, 8 * (value // 4) + 2 * (t % 4) + value % 2


def a_fragments(a: np.ndarray, kind: str) -> np.ndarray:
    """Return A (64, K) as the registers of 128 threads: (128, 4) words."""
    per = 4 // np.dtype(FORMATS[kind]).itemsize
    thread, value = np.arange(128)[:, None], np.arange(4 * per)[None, :]
    t, word, e = thread % 32, value // per, value % per
    row = 16 * (thread // 32) + t // 4 + 8 * (word % 2)
    column = per * (t % 4) + e + 4 * per * (word // 2)
    return np.ascontiguousarray(a.astype(FORMATS[kind])[row, column]).view(np.uint32)


@dataclass
class Wgmma:
    """One wgmma, or several along K within a swizzle row."""

    a: Layout | str  # a string: the kind of A in registers
    b: Layout
    n: int
    d: str = "f32"
    steps: int = 1  # of K
    scale_d: int = 1
    signs: tuple[int, int] = (1, 1)
    more: str = ""  # modifiers
    seed: int = 0

    @property
    def a_kind(self) -> str:
        return self.a if isinstance(self.a, str) else self.a.kind

    def text(self, registers: list[str], step: int) -> str:
        k = k_of(self.b.kind)
        op = f"wgmma.mma_async.sync.aligned.m64n{self.n}k{k}{self.more}.{self.d}"
        first = "{%r20, %r21, %r22, %r23}" if isinstance(self.a, str) else "%d2"
        rest = []
        if self.d != "s32":
            rest += [str(s) for s in self.signs]
        if self.b.kind in ("f16", "bf16"):
            layouts = [self.b] if isinstance(self.a, str) else [self.a, self.b]
            rest += [str(int(x.mn_major)) for x in layouts]
        moved = "".join(f"add.u64 {x}, {x}, 2;" for x in ("%d2", "%d3")) if step else ""
        tail = ", ".join(["%p2", *rest])
        return (
            f"{moved} {op}.{self.a_kind}.{self.b.kind} {{{', '.join(registers)}}}, {first}, %d3, "
            f"{tail};"
        )

    def values(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        k = k_of(self.b.kind) * self.steps
        a = small_integers(self.a_kind, (64, k), self.seed)
        b = small_integers(self.b.kind, (self.n, k), self.seed + 1)
        c = np.random.default_rng(self.seed + 2).integers(-64, 64, (64, self.n))
        return a, b, c

    def want(self) -> np.ndarray:
        a, b, c = self.values()
        product = a @ b.T * (self.signs[0] * self.signs[1])
        return product + (c if self.scale_d else 0)

    def run(self, execute, c: np.ndarray | None = None, **how) -> np.ndarray:
        """Run it, and return D (64, n)."""
        a, b, given = self.values()
        c = given if c is None else c
        smem = np.zeros(98304, np.uint8)
        setup = descriptor_text("%d3", self.b, "sm_90a")
        self.b.put(smem, b)
        arrays = {"s": aligned(smem)}
        if isinstance(self.a, str):
            arrays["a"] = aligned(a_fragments(a, self.a))
            setup += "ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%a_i];"
        else:
            self.a.put(smem, a)
            arrays["s"] = aligned(smem)
            setup += descriptor_text("%d2", self.a, "sm_90a")
        row, column = d_places(self.n)
        dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[self.d]
        words = np.ascontiguousarray(c.astype(dtype)[row, column]).view(np.uint32)
        arrays["c"] = aligned(words)
        count = words.shape[1]
        registers = [f"%r{64 + i}" for i in range(count)]
        body = [FILL.format(bytes=len(smem)), setup, f"setp.eq.u32 %p2, {self.scale_d}, 1;"]
        body += [f"ld.global.u32 {r}, [%c_i+{4 * i}];" for i, r in enumerate(registers)]
        body += ["wgmma.fence.sync.aligned;"]
        for step in range(self.steps):
            body += [self.text(registers, step), "setp.eq.u32 %p2, %r0, %r0;"]
        body += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
        body += [f"st.global.u32 [%c_i+{4 * i}], {r};" for i, r in enumerate(registers)]
        execute("\n".join(body), arrays, Shape(block=128, smem=len(smem)), **how)
        out = np.empty((64, self.n), dtype)
        out[row, column] = arrays["c"].view(dtype)
        return out

    def check(self, execute) -> None:
        np.testing.assert_array_equal(self.run(execute), self.want().astype(self.run_type))

    @property
    def run_type(self):
        return {"f32": np.float32, "f16": np.float16, "s32": np.int32}[self.d]


K_MAJOR = [("f16", "bf16"), ("bf16", "tf32"), ("e4m3", "e5m2"), ("s8", "u8")]
FLOAT_KINDS = ("f16", "bf16", "tf32", "e4m3", "e5m2")
INTEGER_PAIRS = [("s8", "s8"), ("u8", "u8"), ("s8", "u8"), ("u8", "s8")]
B_AT = 32768  # where B starts: both operands fit, with gaps


@pytest.mark.sweep(2)
@pytest.mark.parametrize("n", [8, 24, 64, 104, 136, 256])
def test_every_n(execute, n):
    a, b = packed("f16", 128), packed("f16", 128, start=B_AT)
    Wgmma(a, b, n, seed=n).check(execute)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_k_major_operands_of_every_format_and_swizzle(execute, kind, swizzle):
    a = packed(kind, swizzle, rows=64, gap=1024)
    b = packed(kind, swizzle, start=B_AT, rows=40)
    Wgmma(a, b, 40).check(execute)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("a", "b"), INTEGER_PAIRS)
@pytest.mark.parametrize("registers", [False, True])
def test_integers_accumulate_in_s32(execute, a, b, registers):
    first = a if registers else packed(a, 128)
    Wgmma(first, packed(b, 64, start=B_AT), 48, "s32").check(execute)


@pytest.mark.parametrize("more", ["", ".satfinite"])
def test_s32_wraps_or_saturates(execute, more):
    case = Wgmma(packed("s8", 128), packed("s8", 128, start=B_AT), 32, "s32", more=more)
    edge = np.where(np.arange(64 * 32).reshape(64, 32) % 2, (1 << 31) - 50, -(1 << 31) + 50)
    a, b, _ = case.values()
    total = a @ b.T + edge
    limits = np.iinfo(np.int32)
    want = total.clip(limits.min, limits.max) if more else total.astype(np.int32)
    assert (total != total.astype(np.int32)).any()
    np.testing.assert_array_equal(case.run(execute, edge), want)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["f16", "e4m3", "e5m2"])
@pytest.mark.parametrize("scale_d", [0, 1])
def test_accumulators_of_f16(execute, kind, scale_d):
    a, b = packed(kind, 128), packed(kind, 128, start=B_AT)
    Wgmma(a, b, 72, "f16", scale_d=scale_d).check(execute)


@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_a_in_registers(execute, kind):
    Wgmma(kind, packed(kind, 64, start=B_AT), 88).check(execute)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, True), (True, False), (True, True)])
def test_mn_major_16_bit_operands(execute, kind, swizzle, a_mn, b_mn):
    gap = 1024 if swizzle else 16
    a = packed(kind, swizzle, a_mn, rows=64, gap=gap, k_atoms=2)
    b = packed(kind, swizzle, b_mn, start=B_AT, rows=96, gap=gap, k_atoms=2)
    Wgmma(a, b, 96).check(execute)


def test_mn_major_b_with_a_in_registers(execute):
    Wgmma("bf16", packed("bf16", 128, True, start=B_AT, k_atoms=2), 160).check(execute)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("scale_d", [0, 1])
@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_scale_d_and_negation(execute, scale_d, signs):
    a, b = packed("bf16", 128), packed("bf16", 64, start=B_AT)
    Wgmma(a, b, 16, scale_d=scale_d, signs=signs).check(execute)


@pytest.mark.parametrize(("kind", "swizzle"), [("f16", 128), ("e4m3", 64), ("tf32", 128)])
def test_k_steps_within_a_swizzle_row_advance_the_start_by_32_bytes(execute, kind, swizzle):
    a, b = packed(kind, swizzle), packed(kind, swizzle, start=B_AT)
    Wgmma(a, b, 64, steps=swizzle // 32, scale_d=0).check(execute)


def test_products_of_normal_numbers_are_near_float64(execute):
    case = Wgmma(packed("bf16", 128), packed("bf16", 128, start=B_AT), 64, steps=4, scale_d=0)
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(64, 64)).astype(FORMATS["bf16"]) for _ in range(2))
    case.values = lambda: (a, b, np.zeros((64, 64)))  # type: ignore[method-assign]
    want = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(case.run(execute), want, atol=1e-4)


# -- refused operands ------------------------------------------------------------------------------


def test_an_operand_past_the_end_of_shared_memory_is_refused():
    b = Layout("f16", 128, sbo=65536, start=B_AT)
    case = Wgmma(packed("f16", 128), b, 64)
    case.b = packed("f16", 128, start=B_AT)
    far = Wgmma.text(case, [f"%r{64 + i}" for i in range(32)], 0)
    body = descriptor_text("%d2", case.a, "sm_90a") + descriptor_text("%d3", b, "sm_90a")
    with pytest.raises(BadOperand, match=r"operand B of wgmma .* past the CTA's"):
        simulate_ptx(
            "mov.u32 %r0, smem; setp.eq.u32 %p2, %r0, %r0;" + body + far,
            {"s": np.zeros(4, np.uint8)}, Shape(block=128, smem=65536),
        )  # fmt: skip


def test_operands_that_nothing_has_written_are_found():
    case = Wgmma(packed("f16", 128), packed("f16", 128, start=8192), 8)
    text = Wgmma.text(case, [f"%r{64 + i}" for i in range(4)], 0)
    setup = descriptor_text("%d2", case.a, "sm_90a") + descriptor_text("%d3", case.b, "sm_90a")
    with pytest.raises(Hazards, match="holds shared memory that nothing has written"):
        simulate_ptx(
            "mov.u32 %r0, smem; setp.ne.u32 %p2, %r0, %r0;" + setup + "wgmma.fence.sync.aligned;"
            + text + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
            {"s": np.zeros(4, np.uint8)}, Shape(block=128, smem=65536),
        )  # fmt: skip


def test_sparse_wgmma_is_named():
    registers = ", ".join(f"%r{64 + i}" for i in range(4))
    text = (
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 "
        f"{{{registers}}}, %d2, %d3, %r1, 0, %p2, 1, 1, 0, 0;"
    )
    with pytest.raises(UnknownInstruction, match=r"modifier \.sp"):
        simulate_ptx(text, {"s": np.zeros(4, np.uint8)}, Shape(block=128, smem=1024))


# -- registers of a wgmma in flight ----------------------------------------------------------------

each_order = pytest.mark.parametrize(
    "order", EVERY_ORDER, ids=lambda o: "-".join(map(str, o.values()))
)
IN_REGISTERS = Wgmma("f16", packed("f16", 128, start=B_AT), 16)


def edited(at: str, text: str, **order) -> None:
    """Run a wgmma with A in registers, with ``text`` in place of ``at``."""

    def execute(body: str, arrays: dict, shape: Shape, **how) -> None:
        assert body.count(at) == 1
        simulate_ptx(body.replace(at, text), arrays, shape, **order)

    IN_REGISTERS.run(execute)


COMMIT, FENCE = "wgmma.commit_group.sync.aligned;", "wgmma.fence.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


@pytest.mark.sweep(4)
@each_order
@pytest.mark.parametrize(
    ("access", "found"),
    [
        ("mov.b32 %r21, 0;", "writes an A register .*: no wgmma.wait_group says"),
        ("add.u32 %r9, %r64, 0;", "reads an accumulator register before wgmma.wait_group"),
        (
            "mov.b32 %r8, %r64; mov.b32 %r9, %r8; add.u32 %r9, %r9, 0;",
            "reads an accumulator register before wgmma.wait_group",
        ),
        ("mov.b32 %r64, 0;", "writes an accumulator register before wgmma.wait_group"),
    ],
)
def test_registers_belong_to_a_wgmma_until_its_group_is_waited_for(access, found, order):
    """PTX ISA 9.7.15.7.3: it may complete at any time before that, or not."""
    with pytest.raises(Hazards, match=found):
        edited(COMMIT, COMMIT + access, **order)


@pytest.mark.sweep(2)
@each_order
def test_an_accumulator_in_flight_may_have_other_names(order):
    """Compilers rename where paths meet, before a wait that does not name the registers."""
    before, after = "mov.b32 {0}, {1}; mov.b32 {1}, {2};", "mov.b32 {2}, {1}; mov.b32 {1}, {0};"
    names = "%r9", "%r64", "%r65"
    edited(WAIT, before.format(*names) + WAIT + after.format(*names), **order)


def test_registers_that_nothing_has_written_are_not_added_to():
    def without_loads(body: str, arrays: dict, shape: Shape) -> None:
        simulate_ptx(re.sub(r"ld\.global\.u32 %r\d+, \[%c_i[^;]*;", "", body), arrays, shape)

    with pytest.raises(Hazards, match=r"uninitialised: wgmma of CTA .* adds to registers that"):
        IN_REGISTERS.run(without_loads)


@pytest.mark.parametrize(("text", "told"), [
    ("and.b32 %r90, %lane, 1; cvt.u64.u32 %d9, %r90; add.u64 %d3, %d3, %d9;", "descriptors"),
    ("setp.lt.u32 %p2, %lane, 16;", "values of scale-d"),
])  # fmt: skip
def test_lanes_of_a_warp_name_one_operand(text, told):
    with pytest.raises(BadOperand, match=rf"lanes of .* name different {told}"):
        edited(FENCE, FENCE + text)


@each_order
def test_registers_of_a_may_be_read_meanwhile(order):
    edited(COMMIT, COMMIT + "mov.b32 %r9, %r21;", **order)


@pytest.mark.sweep(2)
@each_order
def test_the_first_wgmma_comes_after_a_fence(order):
    """PTX ISA 9.7.15.7.1"""
    with pytest.raises(Hazards, match="a register that the warp has accessed since its last"):
        edited(FENCE, "", **order)


@pytest.mark.sweep(3)
@each_order
@pytest.mark.parametrize("register", ["%r20", "%r64"])
def test_a_fence_stands_between_an_access_to_registers_and_a_wgmma(register, order):
    with pytest.raises(Hazards, match="a register that the warp has accessed since its last"):
        edited(FENCE, f"{FENCE} add.u32 {register}, {register}, 0;", **order)


@pytest.mark.sweep(3)
@each_order
@pytest.mark.parametrize("register", ["%r20", "%r64"])
def test_a_read_that_no_fence_follows_is_an_advisory(register, order):
    """By the letter (9.7.15.7.1): NVIDIA's GEMM of fp8 on Hopper reads an accumulator so."""
    told: list[str] = []

    def execute(body: str, arrays: dict, shape: Shape, **how) -> None:
        body = body.replace(FENCE, f"{FENCE} add.u32 %r9, {register}, 0;")
        told.extend(a.message for a in simulate_ptx(body, arrays, shape, **order).advisories)

    IN_REGISTERS.run(execute)
    assert len(told) == 1 and "accessed since its last wgmma.fence" in told[0]
