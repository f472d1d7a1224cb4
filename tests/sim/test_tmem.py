"""Tensor memory: the lanes and columns that each form of ld and st moves, and the owners of
columns.

PTX shows the register fragments as figures; the strides here are those of CUTLASS's atoms.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
from barriers import ALLOC, FREE
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim.errors import BadAddress, BadOperand, BarrierMisuse, Deadlock, Hazards, SimError

SPLIT = 96  # columns between the halves of 16x32bx2


@dataclass(frozen=True)
class Form:
    """A form of ld and st: (count, stride in bits) per mode of the thread and of its registers, in
    a matrix whose rows, one per lane, have ``width`` bits; x2, x4 .. repeat it along the columns.
    """

    width: int
    threads: tuple[tuple[int, int], ...]
    registers: tuple[tuple[int, int], ...]
    most: int  # repetitions

    def places(self, repeats: int, packed: bool, split: int) -> tuple[np.ndarray, np.ndarray]:
        """Lane and column of every 16- or 32-bit element: two (registers, pieces, 32) arrays."""
        thread = _bits(np.arange(32), self.threads)
        count = int(np.prod([n for n, _ in self.registers]))
        register = np.arange(count * repeats)
        bit = thread[None, :] + _bits(register % count, self.registers)[:, None]
        lane = bit // self.width
        column = bit % self.width // 32 + (register // count * (self.width // 32))[:, None]
        if packed:  # elements of 16 bits have a column each
            column = np.stack([2 * column, 2 * column + 1], 1)
        else:
            column = column[:, None]
        column = column + split * (np.arange(32) // 16)
        return np.broadcast_to(lane[:, None], column.shape), column


def _bits(index: np.ndarray, modes: tuple[tuple[int, int], ...]) -> np.ndarray:
    out = np.zeros_like(index)
    for count, stride in modes:
        out += index % count * stride
        index = index // count
    return out


FORMS = {
    "32x32b": Form(32, ((32, 32),), ((1, 0),), 128),
    "16x64b": Form(64, ((2, 512), (2, 32), (8, 64)), ((1, 0),), 128),
    "16x128b": Form(128, ((4, 32), (8, 128)), ((2, 1024),), 64),
    "16x256b": Form(256, ((4, 64), (8, 256)), ((2, 32), (2, 2048)), 32),
    "16x32bx2": Form(32, ((16, 32), (2, 0)), ((1, 0),), 128),
}
PLAIN = [(shape, 1 << i) for shape, f in FORMS.items() for i in range(f.most.bit_length())]
PACKED = [(shape, n) for shape, f in FORMS.items() for n in (1, 2, 8, f.most) if n <= f.most]
CASES = [*((s, n, False) for s, n in PLAIN), *((s, n, True) for s, n in PACKED)]

START = """
    mov.u32 %r0, smem;
    mov.u32 %r10, %tid.x;
    shr.u32 %r11, %r10, 5;
    setp.eq.u32 %p1, %r11, 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 512;
    bar.sync 0;
    ld.shared.u32 %r12, [%r0];
    shl.b32 %r13, %r11, 21;
    add.u32 %r13, %r13, %r12;
"""
END = """
    bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r12, 512;
"""


def names(count: int) -> list[str]:
    return [f"%r{64 + i}" for i in range(count)]


def listed(registers: list[str]) -> str:
    return "{" + ", ".join(registers) + "}"


def whole(op: str, width: int) -> str:
    """Copy all ``width`` columns of this warp's lanes from t (``op`` ld) or to t (st)."""
    out = []
    for at in range(0, width, 32):
        moves = [f"{op}.global.u32 " + ("{r}, [{m}];" if op == "ld" else "[{m}], {r};")] * 32
        moves = [m.format(r=r, m=f"%t_i+{4 * (at + i)}") for i, (m, r) in
                 enumerate(zip(moves, names(32), strict=True))]  # fmt: skip
        if op == "ld":
            text = f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r13+{at}], {listed(names(32))};"
            out += [*moves, text]
        else:
            text = f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {listed(names(32))}, [%r13+{at}];"
            out += [text, "tcgen05.wait::ld.sync.aligned;", *moves]
    return "\n".join([*out, "tcgen05.wait::st.sync.aligned;"])


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("shape", "repeats", "packed"), CASES)
def test_ld_and_st(shape, repeats, packed):
    split = SPLIT * (2 if packed and repeats > 32 else 1) if shape == "16x32bx2" else 0
    lane, column = FORMS[shape].places(repeats, packed, split)
    if column.max() < 500:
        column = column + 3
    if shape != "32x32b" and repeats % 3 == 1:
        lane = lane + 16  # the upper lanes, sometimes
    width = -(-(int(column.max()) + 1) // 32) * 32
    at, comma = int(lane.min()) << 16 | int(column.min()), f", {split}" if split else ""
    registers = names(len(lane))
    form = f"sync.aligned.{shape}.x{repeats}{{}}.b32"
    load, store = (form.format(p) for p in (".pack::16b", ".unpack::16b")) if packed else (
        form.format(""), form.format(""))  # fmt: skip
    body = [START, whole("ld", width), f"add.u32 %r14, %r13, {at};"]
    body += [f"tcgen05.ld.{load} {listed(registers)}, [%r14]{comma};"]
    body += ["tcgen05.wait::ld.sync.aligned;"]
    for i, r in enumerate(registers):
        body += [f"st.global.u32 [%out_i+{4 * i}], {r};", f"ld.global.u32 {r}, [%v_i+{4 * i}];"]
    body += [f"tcgen05.st.{store} [%r14]{comma}, {listed(registers)};"]
    body += ["tcgen05.wait::st.sync.aligned;", whole("st", width), END]

    draw = np.random.default_rng(repeats)
    t = draw.integers(0, 1 << 32, (128, width), np.uint32)
    v = draw.integers(0, 1 << 32, (128, len(registers)), np.uint32)
    arrays = {"t": aligned(t), "v": aligned(v), "out": aligned(np.zeros_like(v))}
    simulate_ptx("\n".join(body), arrays, Shape(block=128, smem=1024), arch="sm_100a")
    written = np.zeros(t.shape, bool)
    for first in range(0, 128, 32):  # lanes of a warp
        got = t[first + lane, column]  # (registers, pieces, 32)
        want = got[:, 0] & 0xFFFF | got[:, 1] << np.uint32(16) if packed else got[:, 0]
        np.testing.assert_array_equal(arrays["out"][first:][:32].T, want)
        words = v[first:][:32].T  # (registers, 32)
        new = np.stack([words & 0xFFFF, words >> 16] if packed else [words], 1)
        t[first + lane, column] = new
        written[first + lane, column] = True
    low = np.where(written & packed, np.uint32(0xFFFF), np.uint32(0xFFFFFFFF))
    np.testing.assert_array_equal(arrays["t"] & low, t & low)


# -- lanes and columns of other warps --------------------------------------------------------------


def run(body: str, warps: int = 4, ctas: int = 1, **how) -> np.ndarray:
    out = np.zeros(128, np.uint32)
    shape = Shape(grid=ctas, block=32 * warps, cluster=ctas, smem=1024)
    simulate_ptx(body, {"out": out}, shape, arch="sm_100a", **how)
    return out


@pytest.mark.parametrize("op", [
    "ld.sync.aligned.32x32b.x1.b32 {{%r15}}, [{}];", "st.sync.aligned.32x32b.x1.b32 [{}], {{%r15}};"
])  # fmt: skip
@pytest.mark.parametrize("move", [1 << 21, -(1 << 21)])
def test_lanes_of_another_warp_are_its_own(move, op):
    """FlashInfer's MLA of fp8 names those of another quarter, and is right on a B200."""
    skip = "" if move > 0 else "setp.lt.u32 %p2, %r11, 2; @%p2 bra PAST;"
    body = (
        START + skip + "mov.u32 %r15, 7;" + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], {%r15};"
    )
    body += f"tcgen05.wait::st.sync.aligned; add.u32 %r14, %r13, {move & 0xFFFFFFFF};"
    body += (
        f"tcgen05.{op.format('%r14')} tcgen05.wait::ld.sync.aligned; tcgen05.wait::st.sync.aligned;"
        "PAST:" + END
    )
    report = simulate_ptx(body, {"out": np.zeros(1, np.uint32)}, Shape(block=128, smem=1024),
                          arch="sm_100a")  # fmt: skip
    told = [a for a in report.advisories if a.rule == "tensor memory"]
    assert told and "names tensor memory lane" in str(told[0])


def test_lanes_beyond_those_of_the_warp_are_refused():
    body = START + f"add.u32 %r14, %r13, {16 << 16};"
    for op in ("ld.sync.aligned.32x32b.x1.b32 {%r15}, [%r14]", "st.sync.aligned.32x32b.x1.b32 "
               "[%r14], {%r15}"):  # fmt: skip
        with pytest.raises(BadAddress, match=r"warp 0 accesses tensor memory lanes 16\.\.47"):
            run(body + f"tcgen05.{op}; PAST: " + END)


@pytest.mark.parametrize("lane", [0, 16])
def test_an_address_need_not_name_the_quarter_of_the_warp(lane):
    shape = "16x64b" if lane else "32x32b"
    body = f"""{START}
    add.u32 %r14, %r12, {lane << 16}; add.u32 %r15, %r13, {lane << 16}; mov.u32 %r16, 0;
    tcgen05.st.sync.aligned.{shape}.x1.b32 [%r14], {{%r10}}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{shape}.x1.b32 {{%r16}}, [%r15]; tcgen05.wait::ld.sync.aligned;
    st.global.b32 [%out_i], %r16; {END}"""
    assert run(body).tolist() == list(range(128))


@pytest.mark.parametrize("text", [
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [{x}], {{%r5}};",
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r5}}, [{x}];",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], {x};",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 {x}, 512;",
], ids=["st", "ld", "alloc", "dealloc"])  # fmt: skip
def test_lanes_of_a_warp_name_one_place(text):
    """They execute such an instruction together, and hardware takes one value for all."""
    body = START + "and.b32 %r20, %lane, 1; add.u32 %r20, %r20, %r13;" + text.format(x="%r20")
    with pytest.raises(BadOperand, match=r"lanes of .* name different (addresses|counts)"):
        run(body, warps=1)


def test_a_16_lane_form_starts_at_a_multiple_of_16():
    body = START + f"add.u32 %r14, %r13, {8 << 16};"
    with pytest.raises(BadAddress, match=r"lanes 8\.\.23"):
        run(body + "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r15}, [%r14];" + END)


@pytest.mark.parametrize("column", [64, 500])
def test_columns_that_were_not_allocated_are_refused(column):
    body = (START + END).replace(", 512;", ", 64;").replace("bar.sync 0;\n    @%p1 tcgen05.de",
        f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r15}}, [%r13+{column}];"
        "bar.sync 0;\n    @%p1 tcgen05.de")  # fmt: skip
    at = 448 + column
    with pytest.raises(BadAddress, match=rf"columns {at}\.\.{at}, but columns 448\.\.511 are"):
        run(body)


@pytest.mark.parametrize(("then", "told"), [
    ("add.u32 %r15, %r15, 1;", True),
    ("mov.u32 %r16, %r15; st.shared.u32 [%r0+512], %r16;", True),
    ("mov.u32 %r16, %r15; mov.u32 %r15, 3; add.u32 %r15, %r15, 1;", False),
    ("selp.u32 %r15, 5, %r15, %p1; st.shared.u32 [%r0+512], %r15;", False),
], ids=["added to", "moved and stored", "overwritten", "not chosen"])  # fmt: skip
def test_columns_that_nothing_has_written_are_told_of_when_used(then, told):
    """cuDNN's top-k of sparse attention loads sums before the first, and adds to none."""
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r15}, [%r13]; tcgen05.wait::ld.sync.aligned;"
    found = nullcontext()
    if told:
        found = pytest.raises(Hazards, match=r"uninitialised: tcgen05.ld of .* warp 0 reads tensor")
    with found:
        run(START + load + then + END, warps=1)


def test_columns_without_any_allocation_are_refused():
    with pytest.raises(BadAddress, match="but none is allocated"):
        run("mov.u32 %r13, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r15}, [%r13];", warps=1)


# -- allocation ------------------------------------------------------------------------------------


def test_allocations_do_not_overlap():
    sizes = [32, 128, 64, 256]
    body = ["mov.u32 %r0, smem;"]
    for i, n in enumerate(sizes):
        body.append(ALLOC.format(g=1, at=0, n=n) + f"ld.shared.u32 %r{20 + i}, [%r0];")
        body.append(f"st.global.u32 [%out+{4 * i}], %r{20 + i};")
    body += [FREE.format(g=1, at=20 + i, n=n) for i, n in enumerate(sizes)]
    first = run("\n".join(body), warps=1)[: len(sizes)].astype(int)
    taken = np.concatenate([f + np.arange(n) for f, n in zip(first, sizes, strict=True)])
    assert len(set(taken.tolist())) == sum(sizes) and taken.max() < 512


@pytest.mark.parametrize("columns", [16, 48, 1024, 0])
def test_other_numbers_of_columns_are_refused(columns):
    body = f"mov.u32 %r0, smem; mov.u32 %r1, {columns};" + ALLOC.format(g=1, at=0, n="%r1")
    with pytest.raises(BadOperand, match=f"tcgen05.alloc of {columns} columns: takes 32, 64"):
        run(body, warps=1)


def test_allocating_after_the_permit_was_given_up_is_refused():
    body = "mov.u32 %r0, smem; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    with pytest.raises(BarrierMisuse, match="after relinquish_alloc_permit"):
        run(body + ALLOC.format(g=1, at=0, n=32), warps=1)


def waiting(free: str) -> str:
    """Warp 0 allocates all columns; warp 1 requests 256 and writes 7 once it has them."""
    return f"""
        mov.u32 %r0, smem;
        add.u32 %r1, %r0, 16;
        mov.u32 %r10, %tid.x;
        shr.u32 %r11, %r10, 5;
        setp.eq.u32 %p1, %r11, 0;
        @%p1 {ALLOC.format(g=1, at=0, n=512)}
        bar.sync 0;
        @!%p1 {ALLOC.format(g=1, at=1, n=256)}
        @%p1 bra FIRST;
        ld.shared.u32 %r13, [%r1];
        st.global.u32 [%out], 7;
        {FREE.format(g=1, at=13, n=256)}
        bra LAST;
        FIRST: ld.shared.u32 %r12, [%r0];
        {free}
        LAST:
    """


@pytest.mark.parametrize("order", ["fifo", "eager", "starved", "random"])
def test_alloc_waits_until_there_is_room(order):
    assert run(waiting(FREE.format(g=1, at=12, n=512)), warps=2, order=order)[0] == 7


def test_alloc_that_waits_for_ever_says_for_what():
    with pytest.raises(Deadlock, match=r"tcgen05\.alloc: 256 columns wanted, 0 free"):
        run(waiting(""), warps=2)


def test_columns_never_given_back_are_found():
    body = "mov.u32 %r0, smem;" + ALLOC.format(g=1, at=0, n=64)
    with pytest.raises(Hazards, match=r"returns without tcgen05\.dealloc of 64 columns"):
        run(body, warps=1)


def test_giving_back_what_was_not_taken_is_refused():
    body = "mov.u32 %r0, smem; mov.u32 %r1, 64;" + ALLOC.format(g=1, at=0, n=64)
    with pytest.raises(
        BadAddress, match=r"columns 64\.\.127, but columns 448\.\.511 are allocated"
    ):
        run(body + FREE.format(g=1, at=1, n=64), warps=1)


@pytest.mark.parametrize(
    ("smem", "columns", "told"),
    [
        (1024, 128, True),
        (150000, 128, False),  # the CTA has its SM for itself
        (1024, 512, False),  # there is one place for all columns
    ],
)
def test_columns_by_a_number_of_ones_own_are_refused_where_ctas_share_an_sm(smem, columns, told):
    """Not what tcgen05.alloc has written: another CTA of the SM may have these."""
    body = f"""mov.u32 %r0, smem; {ALLOC.format(g=1, at=0, n=columns)} mov.u32 %r1, 0;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {{%lane}}; tcgen05.wait::st.sync.aligned;
        ld.shared.u32 %r2, [%r0]; {FREE.format(g=1, at=2, n=columns)}"""
    arrays = {"out": np.zeros(1, np.uint32)}
    shape = Shape(block=32, smem=smem)
    if not told:
        simulate_ptx(body, arrays, shape, arch="sm_100a")
        return
    with pytest.raises(
        BadAddress, match=r"384\.\.511 are allocated, as on an SM that several CTAs"
    ):
        simulate_ptx(body, arrays, shape, arch="sm_100a")


def pair(second: str) -> str:
    """Each CTA of a pair allocates 128 columns with the other; ``second`` guards that of rank 1."""
    return f"""
        mov.u32 %r0, smem;
        mov.u32 %r14, %cluster_ctarank;
        setp.eq.u32 %p1, %r14, 0;
        {second} bra PAST;
        {ALLOC.format(g=2, at=0, n=128)}
        ld.shared.u32 %r12, [%r0];
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        {FREE.format(g=2, at=12, n=128)}
        PAST:
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        @%p1 st.global.u32 [%out], 7;
    """


@pytest.mark.parametrize("order", ["fifo", "peer-late", "random"])
def test_a_pair_allocates_together(order):
    assert run(pair("setp.ne.u32 %p2, %r0, %r0; @%p2"), warps=1, ctas=2, order=order)[0] == 7


def test_half_a_pair_waits_for_the_other():
    with pytest.raises(Deadlock, match=r"the other CTA of the pair, CTA \(1,0,0\), has not asked"):
        run(pair("@!%p1"), warps=1, ctas=2)


def test_reading_columns_that_were_given_back_is_refused():
    with pytest.raises(SimError, match="but none is allocated"):
        run(START + END + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r15}, [%r13];")
