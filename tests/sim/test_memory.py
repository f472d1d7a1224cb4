"""Loads, stores and atomics, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BadAddress, BadOperand, Hazards, UnknownInstruction

REGISTER = {8: "%h", 16: "%h", 32: "%r", 64: "%d"}
VECTORS = [(b, n) for b in (8, 16, 32, 64) for n in (1, 2, 4) if b * n <= 128]


def move(bits: int, count: int, load: str, source: str, store: str, target: str) -> str:
    """Load a vector of ``count`` registers from ``source`` and store it to ``target``."""
    names = ", ".join(f"{REGISTER[bits]}{i}" for i in range(count))
    vector, items = (f".v{count}", "{" + names + "}") if count > 1 else ("", names)
    return (
        f"{load}{vector}.u{bits} {items}, [{source}]; {store}{vector}.b{bits} [{target}], {items};"
    )


def random_rows(bits: int, count: int, threads: int) -> np.ndarray:
    raw = np.random.default_rng(bits + count).integers(
        0, 256, (threads, bits // 8 * count), np.uint8
    )
    return raw.view(f"u{bits // 8}")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("bits", "count"), VECTORS)
def test_every_width_through_every_space(execute, bits, count):
    """Global, shared, local, shared again and global, the last three by generic addresses."""
    a = random_rows(bits, count, 64)
    out = np.zeros_like(a)
    code = [
        ".local .align 16 .b8 mine[64];",
        ".reg .b32 here, base; .reg .b64 wide, own;",
        "mov.u32 base, smem; mov.u32 here, %tid.x;",
        f"mad.lo.u32 here, here, {a.strides[0]}, base;",
        "cvt.u64.u32 wide, here; cvta.shared.u64 wide, wide;",
        "mov.u64 own, mine; cvta.local.u64 own, own;",
        move(bits, count, "ld.global", "%a_i", "st.shared", "here"),
        move(bits, count, "ld.shared::cta", "here", "st", "own+32"),
        move(bits, count, "ld", "own+32", "st", "wide"),
        move(bits, count, "ld.volatile", "wide", "st", "%out_i"),
    ]
    execute("\n".join(code), {"a": a, "out": out}, Shape(block=64, smem=64 * 16))
    assert (out == a).all()


@pytest.mark.parametrize("kind", ["s8", "s16", "u8", "u16"])
def test_a_narrow_load_extends_into_its_register(execute, kind):
    a = np.arange(-16, 16).astype({"s": np.int8, "u": np.uint8}[kind[0]])
    a = a.astype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
    out = np.zeros(32, np.int32)
    execute(f"ld.global.{kind} %r0, [%a_i]; st.global.b32 [%out_i], %r0;", {"a": a, "out": out})
    assert (out == a.astype(np.int32)).all()


def test_static_and_dynamic_shared_memory_and_module_variables(execute):
    head = """
    .shared .align 8 .b32 first; .shared .align 16 .b8 second[64];
    .const .align 4 .b32 table[4] = {3, 1, 4, 1};
    .global .align 4 .b32 counter = 7;
    """
    out = np.zeros((32, 4), np.int32)
    body = """
    .reg .b64 address, offset; .reg .b32 three;
    setp.eq.u32 %p0, %lane, 0;
    mov.b32 three, 33;
    @%p0 st.shared.b32 [first], 11; @%p0 st.shared.b32 [second+60], 22;
    @%p0 st.shared.b32 [smem+128], three;
    bar.sync 0;
    ld.shared.b32 %r0, [first]; ld.shared.b32 %r1, [second+60]; ld.shared.b32 %r2, [smem+128];
    and.b32 %r4, %lane, 3; mul.wide.u32 offset, %r4, 4; mov.u64 address, table;
    add.u64 address, address, offset; ld.const.b32 %r3, [address];
    ld.global.b32 %r5, [counter]; add.s32 %r3, %r3, %r5;
    st.global.v4.b32 [%out_i], {%r0, %r1, %r2, %r3};
    """
    execute(body, {"out": out}, Shape(smem=256), head=head)
    assert (out[:, :3] == [11, 22, 33]).all()
    assert (out[:, 3] == np.array([3, 1, 4, 1])[np.arange(32) % 4] + 7).all()


def test_lanes_of_one_generic_load_may_lie_in_different_spaces(execute):
    a, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    body = """
    .local .align 4 .b32 mine; .reg .b64 place, own; .reg .b32 here, v, third;
    mul.lo.s32 v, %lane, 100; mov.u32 here, smem; mad.lo.u32 here, %lane, 4, here;
    st.shared.b32 [here], v; neg.s32 v, v; st.local.b32 [mine], v;
    rem.u32 third, %lane, 3;
    mov.u64 place, %a_i;
    setp.eq.u32 %p0, third, 1; cvt.u64.u32 own, here; cvta.shared.u64 own, own;
    @%p0 mov.u64 place, own;
    setp.eq.u32 %p0, third, 2; mov.u64 own, mine; cvta.local.u64 own, own;
    @%p0 mov.u64 place, own;
    ld.b32 v, [place]; add.s32 v, v, 1; st.b32 [place], v; ld.b32 v, [place];
    st.global.b32 [%out_i], v;
    """
    execute(body, {"a": a, "out": out}, Shape(smem=256))
    lane = np.arange(32)
    assert (out == np.choose(lane % 3, [lane, lane * 100, -lane * 100]) + 1).all()


@pytest.mark.parametrize(("use", "source", "right"), [
    ("ld.u32 %r1, [%d2]; st.global.u32 [%out_i], %r1;", "3", False),
    ("st.u32 [%d2], 5;", "3", False),
    ("cvta.to.local.u64 %d2, %d2; ld.local.u32 %r1, [%d2]; st.global.u32 [%out_i], %r1;", "3",
     False),
    ("ld.u32 %r1, [%d2+4]; st.global.u32 [%out_i], %r1;", "%lane", True),
])  # fmt: skip
@pytest.mark.parametrize("by", ["shfl", "shared memory"])
def test_local_memory_of_another_lane_is_out_of_reach(use, source, right, by):
    """Hardware takes the thread's own memory at that place, so the number is wrong and nothing
    traps."""
    hand = {
        "shfl": f"""mov.b64 {{%r5, %r6}}, %d1; shfl.sync.idx.b32 %r5, %r5, {source}, 31, -1;
            shfl.sync.idx.b32 %r6, %r6, {source}, 31, -1; mov.b64 %d2, {{%r5, %r6}};""",
        "shared memory": f"""mov.u32 %r5, smem; mad.lo.u32 %r6, %lane, 8, %r5;
            st.shared.u64 [%r6], %d1; bar.warp.sync -1; mad.lo.u32 %r6, {source}, 8, %r5;
            ld.shared.u64 %d2, [%r6];""",
    }[by]
    body = f""".local .align 8 .b8 mine[8]; st.local.v2.u32 [mine], {{%lane, %lane}};
        mov.u64 %d1, mine; cvta.local.u64 %d1, %d1; {hand} {use}"""
    out = np.zeros(32, np.uint32)
    if right:
        simulate_ptx(body, {"out": out}, Shape(smem=256))
        assert out.tolist() == list(range(32))
        return
    with pytest.raises(BadAddress, match=r"lane 0 uses the address of local memory of lane 3 of"):
        simulate_ptx(body, {"out": out}, Shape(smem=256))


def test_isspacep(execute):
    out = np.zeros((32, 4), np.int32)
    spaces = ("global", "shared", "local", "shared::cluster")
    lines = [".local .align 4 .b32 mine; .reg .b64 g, s, l; .reg .b32 here;"]
    lines += ["mov.u32 here, smem; cvt.u64.u32 s, here; cvta.shared.u64 s, s;"]
    lines += ["mov.u64 l, mine; cvta.local.u64 l, l; mov.u64 g, %out;"]
    for i, space in enumerate(spaces):
        lines.append(f"mov.b32 %r{i}, 0;")
        for j, pointer in enumerate("gsl"):
            lines.append(f"isspacep.{space} %p0, {pointer}; selp.b32 %r9, {1 << j}, 0, %p0;")
            lines.append(f"or.b32 %r{i}, %r{i}, %r9;")
    lines.append("st.global.v4.b32 [%out_i], {%r0, %r1, %r2, %r3};")
    execute("\n".join(lines), {"out": out}, Shape(smem=64))
    assert (out == [1, 2, 4, 2]).all()


def test_predicated_lanes_alone_touch_memory(execute):
    a, out = np.arange(32, dtype=np.int32), np.full(32, -1, np.int32)
    body = """
    setp.lt.u32 %p0, %lane, 7; mov.b32 %r0, 5; mov.u64 %d0, 0; @%p0 mov.u64 %d0, %a_i;
    @%p0 ld.global.b32 %r0, [%d0]; @!%p0 bra SKIP; st.global.b32 [%out_i], %r0; SKIP:
    """
    execute(body, {"a": a, "out": out})
    assert out.tolist() == [*range(7), *[-1] * 25]


def test_256_bit_accesses_of_sm_100():
    a = np.arange(32 * 8, dtype=np.uint32).reshape(32, 8)
    out = np.zeros_like(a)
    names = "{" + ", ".join(f"%r{i}" for i in range(8)) + "}"
    body = f"ld.global.v8.b32 {names}, [%a_i]; st.global.v8.b32 [%out_i], {names};"
    a, out = _aligned(a, 32), _aligned(out, 32)
    simulate_ptx(body, {"a": a, "out": out}, arch="sm_100a")
    assert (out == a).all()


def _aligned(array: np.ndarray, to: int) -> np.ndarray:
    raw = np.empty(array.nbytes + to, np.uint8)
    start = -raw.ctypes.data % to
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


# -- atomics ---------------------------------------------------------------------------------------

INTEGER_ATOMICS = {
    "add": lambda old, x: old + x, "min": min, "max": max, "exch": lambda old, x: x,
    "and": lambda old, x: old & x, "or": lambda old, x: old | x, "xor": lambda old, x: old ^ x,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}  # fmt: skip
KINDS = {
    "u32": ("add", "min", "max", "inc", "dec"), "s32": ("add", "min", "max"),
    "u64": ("add", "min", "max"), "s64": ("min", "max"), "b32": ("and", "or", "xor", "exch"),
    "b64": ("and", "or", "xor", "exch"),
}  # fmt: skip


@pytest.mark.sweep(5)
@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names]
)
def test_atomics_on_one_place_each(execute, kind, name, space):
    """Each lane has a word of its own, so its previous value is compared too."""
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
    random, info = np.random.default_rng(7), np.iinfo(dtype)
    a, x = (random.integers(info.min // 4, info.max // 4, 32, dtype) for _ in range(2))
    a[:4], x[:4] = [0, 5, 7, 7], [3, 5, 6, 8]
    before, out = a.copy(), np.zeros_like(a)
    r = REGISTER[8 * dtype.itemsize]
    bits = f"b{8 * dtype.itemsize}"
    body = f"""
    .reg .b32 here; mov.u32 here, smem; mad.lo.u32 here, %lane, 8, here;
    ld.global.{bits} {r}0, [%x_i]; ld.global.{bits} {r}1, [%a_i]; st.shared.{bits} [here], {r}1;
    atom.{space}.{name}.{kind} {r}2, [{"here" if space == "shared" else "%a_i"}], {r}0;
    st.global.{bits} [%out_i], {r}2;
    ld.shared.{bits} {r}3, [here];
    {"st.global." + bits + " [%a_i], " + r + "3;" if space == "shared" else ""}
    """
    execute(body, {"a": a, "x": x, "out": out}, Shape(smem=512))
    assert (out == before).all()
    want = [INTEGER_ATOMICS[name](int(o), int(v)) for o, v in zip(before, x, strict=True)]
    assert a.tolist() == np.array(want, object).astype(dtype).tolist()


def test_every_thread_of_a_grid_counts_once(execute):
    total, seen = np.zeros(4, np.uint32), np.zeros(8 * 64, np.uint32)
    body = """
    atom.global.add.u32 %r0, [%total], 1; st.global.b32 [%seen_i], %r0;
    red.global.max.u32 [%total+4], %i; red.global.add.u32 [%total+8], %i;
    """
    execute(body, {"total": total, "seen": seen}, Shape(grid=8, block=64))
    assert total.tolist() == [512, 511, 511 * 512 // 2, 0]
    assert sorted(seen.tolist()) == list(range(512))


def test_compare_and_swap(execute):
    a, out = np.arange(32, dtype=np.uint32) % 2, np.zeros(32, np.uint32)
    body = "atom.global.cas.b32 %r0, [%a_i], 1, 77; st.global.b32 [%out_i], %r0;"
    execute(body, {"a": a, "out": out})
    assert a.tolist() == [0, 77] * 16 and out.tolist() == [0, 1] * 16


def test_atomics_of_128_bits(execute):
    """One lane after another exchanges; a swap needs both words to be equal."""
    a, out = np.array([1, 2], np.uint64), np.zeros(6, np.uint64)
    body = """
    .reg .b128 %q<3>; setp.eq.u32 %p0, %i, 0; mov.u64 %d0, 1; mov.u64 %d1, 2; mov.u64 %d2, 3;
    mov.b128 %q0, {%d0, %d1}; mov.b128 %q1, {%d0, %d2};
    @%p0 atom.global.cas.b128 %q2, [%a], %q1, %q1; @%p0 st.global.b128 [%out], %q2;
    @%p0 atom.global.cas.b128 %q2, [%a], %q0, %q1; @%p0 st.global.b128 [%out+16], %q2;
    @%p0 atom.global.exch.b128 %q2, [%a], %q0; @%p0 st.global.b128 [%out+32], %q2;
    """
    execute(body, {"a": a, "out": out})
    assert out.tolist() == [1, 2, 1, 2, 1, 3] and a.tolist() == [1, 2]


def test_a_lock_made_of_compare_and_swap_lets_one_lane_in_at_a_time():
    """The simulator's behaviour: whether hardware lets lanes leave a loop alone is the compiler's
    choice.
    """
    state = np.zeros(2, np.uint32)
    body = """
    AGAIN: atom.global.acquire.gpu.cas.b32 %r0, [%state], 0, 1; setp.ne.u32 %p0, %r0, 0;
    @%p0 bra AGAIN;
    ld.relaxed.gpu.global.b32 %r1, [%state+4]; add.u32 %r1, %r1, 1;
    st.relaxed.gpu.global.b32 [%state+4], %r1;
    atom.global.release.gpu.exch.b32 %r0, [%state], 0;
    """
    simulate_ptx(body, {"state": state}, Shape(grid=2, block=12))
    assert state.tolist() == [0, 24]


def test_float_atomics(execute):
    total = np.zeros(4, np.float32)
    wide = np.zeros(1, np.float64)
    body = """
    cvt.rn.f32.u32 %r0, %i; red.global.add.f32 [%total], %r0;
    cvt.rn.f64.u32 %d0, %i; red.global.add.f64 [%wide], %d0;
    red.global.add.v2.f32 [%total+8], {%r0, 0f3F800000};
    """
    execute(body, {"total": total, "wide": wide}, Shape(grid=2, block=64))
    assert total.tolist() == [8128.0, 0.0, 8128.0, 128.0] and wide[0] == 8128.0


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_half_atomics(execute, kind):
    """Powers of two add up exactly in both."""
    total = np.zeros(4, np.uint16)
    one, half = {"f16": (0x3C00, 0x3800), "bf16": (0x3F80, 0x3F00)}[kind]
    word = half << 16 | one
    body = f"""
    mov.b32 %r0, {word}; red.global.add.noftz.{kind}x2 [%total], %r0;
    mov.b16 %h0, {one}; atom.global.add.noftz.{kind} %h1, [%total+4], %h0;
    """
    execute(body, {"total": total})
    values = total.view(np.float16) if kind == "f16" else (total.astype("u4") << 16).view("f4")
    assert values.tolist() == [32.0, 16.0, 32.0, 0.0]


# -- operands and bulk stores ----------------------------------------------------------------------


def test_a_vector_register_is_its_elements(execute):
    """PTX ISA 5.4.2: .x .y .z .w, or .r .g .b .a, and all of them where a vector is wanted."""
    a = np.arange(128, dtype=np.uint32).reshape(32, 4)
    out = np.zeros_like(a)
    body = """
    .reg .v4 .b32 v;
    .reg .v2 .b32 w;
    ld.global.v4.b32 v, [%a_i];
    mov.b32 w.x, v.a;
    mov.b32 w.g, v.y;
    st.global.v2.b32 [%out_i], w;
    st.global.v2.b32 [%out_i+8], {v.z, v.r};
    """
    execute(body, {"a": a, "out": out})
    assert (out == a[:, [3, 1, 2, 0]]).all()


def test_the_sum_of_a_32_bit_address_and_its_offset_has_32_bits() -> None:
    """Compilers fold constants into the offset, and leave a base below zero."""
    out = np.zeros(32, np.uint32)
    code = """
        mov.u32 %r0, smem; sub.u32 %r1, %r0, 65536; shl.b32 %r2, %lane, 2; add.u32 %r1, %r1, %r2;
        st.shared.u32 [%r1+65536], %lane; add.u32 %r2, %r0, %r2; ld.shared.u32 %r3, [%r2];
        mul.wide.u32 %d0, %lane, 4; add.u64 %d0, %d0, %out; st.global.u32 [%d0], %r3;
    """
    simulate_ptx(code, {"out": out}, Shape(smem=128))
    assert out.tolist() == list(range(32))


def test_a_shared_address_of_no_cta_is_shown_whole() -> None:
    code = "mov.u32 %r0, smem; sub.u32 %r0, %r0, 65536; ld.shared.u32 %r1, [%r0];"
    with pytest.raises(BadAddress, match=r"shared 0xffff0400, in no CTA of its cluster, each of"):
        simulate_ptx(code, {"out": np.zeros(32, np.uint32)}, Shape(smem=128))


BULK = """.reg .b32 at, mine; mov.u32 at, smem; mad.lo.u32 mine, %i, 4, at;
    setp.eq.u32 %p0, %i, 0; mov.u32 %r9, 7; st.shared.u32 [mine], %r9; bar.sync 0; HERE
    ld.shared.u32 %r1, [mine]; st.global.u32 [%out_i], %r1;"""
ZEROS = "@%p0 st.bulk.weak.shared::cta [at], 128, 0;"


def _with_bulk_store(here: str) -> np.ndarray:
    out = np.zeros(64, np.uint32)
    body = BULK.replace("HERE", here)
    simulate_ptx(body, {"out": out}, Shape(block=64, smem=256), arch="sm_100a")
    return out


@pytest.mark.parametrize("how", [
    ZEROS, "mov.u32 %r2, 128; @%p0 st.bulk.weak.shared::cta [at], %r2, 0;",
    "cvt.u64.u32 %d1, at; cvta.shared.u64 %d1, %d1; @%p0 st.bulk [%d1], 128, 0;",
])  # fmt: skip
def test_a_bulk_store_of_zeros_is_many_ordinary_stores(how):
    assert _with_bulk_store(f"{how} bar.sync 0;").tolist() == [0] * 32 + [7] * 32


@pytest.mark.parametrize("here, error, sentence", [
    (ZEROS, Hazards, "race: .* wrote at"),
    (ZEROS.replace("128", "132"), BadOperand, "stores 132 bytes: st.bulk takes a multiple of 8"),
    (ZEROS.replace("128", "512"), BadAddress, "outside the CTA's shared memory"),
    (ZEROS.replace("[at]", "[at+4]"), BadAddress, "not aligned"),
    ("@%p0 st.bulk [%out], 128, 0;", BadAddress, "not of shared memory"),
    (ZEROS.replace(", 0;", ", 1;"), UnknownInstruction, "st.bulk stores zeros only"),
])  # fmt: skip
def test_a_bulk_store_is_held_to_what_it_may(here, error, sentence):
    with pytest.raises(error, match=sentence):
        _with_bulk_store(here)
