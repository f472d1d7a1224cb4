"""tcgen05.mma of one CTA and of pairs against products of small integers, exactly."""

from __future__ import annotations

import re

import numpy as np
import pytest
from multiplications import B_AT, LANES, SMEM, Mma, kernel, operand
from operands import FORMATS, Layout
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import ATOMS_OF_32, aligned

from cutex.sim.errors import BadAddress, BadOperand, Hazards, SimError, UnknownInstruction

FLOAT_KINDS = ("f16", "bf16", "tf32", "e4m3", "e5m2")
SHAPES = [(64, 1), (128, 1), (128, 2), (256, 2)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("m", "group"), SHAPES)
@pytest.mark.parametrize("n", [32, 96, 256])
def test_shapes(m, group, n):
    Mma(operand("f16"), operand("bf16", start=B_AT, rows=n // group), m, n, group, seed=n).check()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("n", [8, 24, 248])
def test_one_cta_takes_n_in_steps_of_8(m, n):
    Mma(operand("f16"), operand("f16", rows=n, start=B_AT), m, n).check()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_k_major_operands_of_every_format_and_swizzle(kind, swizzle):
    a, b = operand(kind, swizzle), operand(kind, swizzle, rows=48, start=B_AT)
    Mma(a, b, 128, 48).check()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "s8"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, True), (True, False), (True, True)])
def test_mn_major_operands(kind, swizzle, a_mn, b_mn):
    d = "s32" if kind in ("s8", "u8") else "f32"
    a = operand(kind, swizzle, a_mn)
    b = operand(kind, swizzle, b_mn, rows=64, start=B_AT)
    Mma(a, b, 128, 64, d=d).check()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("m", "group"), SHAPES)
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, True), (True, False), (True, True)])
def test_mn_major_tf32(m, group, a_mn, b_mn):
    a = operand("tf32", ATOMS_OF_32 if a_mn else 128, a_mn)
    b = operand("tf32", ATOMS_OF_32 if b_mn else 128, b_mn, rows=64, start=B_AT)
    Mma(a, b, m, 64, group).check()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("m", "group"), SHAPES)
@pytest.mark.parametrize("kinds", [("s8", "u8"), ("u8", "s8"), ("s8", "s8"), ("u8", "u8")])
def test_integers_accumulate_in_s32(m, group, kinds):
    a, b = operand(kinds[0]), operand(kinds[1], start=B_AT)
    Mma(a, b, m, 64, group, "s32").check()


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("n", [8, 24])
def test_integers_of_few_columns(m, n):
    Mma(operand("s8"), operand("s8", start=B_AT, rows=n), m, n, d="s32").check()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize("kinds", [("e4m3", "e2m1"), ("e2m1", "e5m2"), ("e2m3", "e3m2"),
                                   ("e3m2", "e2m1"), ("e2m1", "e2m3")])  # fmt: skip
def test_elements_of_4_and_6_bits_lie_16_in_16_bytes(kinds, swizzle):
    a, b = (operand(kind, swizzle, rows=r, start=s) for kind, r, s in
            zip(kinds, (128, 64), (0, B_AT), strict=True))  # fmt: skip
    Mma(a, b, 128, 64).check()


@pytest.mark.parametrize(("m", "group"), SHAPES)
def test_steps_of_k_of_elements_of_4_bits(m, group):
    a, b = operand("e4m3"), operand("e2m1", rows=64, start=B_AT)
    Mma(a, b, m, 64, group, steps=4).check()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize(
    ("kind", "form"), [("e2m1", "b4x16_p64"), ("e2m3", "b6x16_p32"), ("e3m2", "b6x16_p32")]
)
def test_cp_takes_elements_of_4_and_6_bits_to_a_byte_each(kind, form, swizzle):
    """And an MMA takes them from there."""
    source = operand(kind, swizzle)
    case = Mma(kind, operand("e4m3", start=B_AT), 128, 64, column=32, a_column=8)
    a, _, _ = case.values()
    images, before = case.shared(), case.tensor_memory()
    source.put(images[0], a)
    before[0, :, 8:16] = 0xFFFFFFFF
    copy = Mma(source, case.b, 128, 64).text()
    setup = copy[copy.index("add.u32 %r21, %r0, 0;") : copy.index("mov.u32 %r23")]
    setup += f"@%p3 tcgen05.cp.cta_group::1.128x256b.b8x16.{form} [%r22], %d2;"
    text = case.text()
    at = text.index("@%p3 tcgen05.mma")
    case.text = lambda: text[:at] + setup + text[at:]  # type: ignore[method-assign]
    case.shared = lambda: images  # type: ignore[method-assign]
    got = case.run(before)
    np.testing.assert_array_equal(got[case.places()].view(np.float32), case.want())
    codes = a.astype(FORMATS[kind]).view(np.uint8) << (2 if kind == "e2m1" else 0)
    np.testing.assert_array_equal(got[0, :, 8:16].copy().view(np.uint8), codes)


@pytest.mark.parametrize("saturate", [False, True])
def test_s32_wraps_or_saturates(saturate):
    case = Mma(operand("s8"), operand("s8", start=B_AT), 128, 32, d="s32", saturate=saturate)
    a, b, _ = case.values()
    edge = np.where(np.arange(128 * 32).reshape(128, 32) % 2, (1 << 31) - 50, -(1 << 31) + 50)
    case.values = lambda: (a, b, edge)  # type: ignore[method-assign]
    total, limits = a @ b.T + edge, np.iinfo(np.int32)
    want = total.clip(limits.min, limits.max) if saturate else total.astype(np.int32)
    assert (total != total.astype(np.int32)).any()
    case.want = lambda: want  # type: ignore[method-assign]
    case.check()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["f16", "e4m3"])
@pytest.mark.parametrize(("m", "group"), SHAPES)
@pytest.mark.parametrize("accumulate", [0, 1])
def test_accumulators_of_f16_take_a_column_each(kind, m, group, accumulate):
    a, b = operand(kind), operand(kind, start=B_AT)
    Mma(a, b, m, 64, group, "f16", accumulate=accumulate).check()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", [*FLOAT_KINDS, "s8"])
@pytest.mark.parametrize(("m", "group"), SHAPES)
def test_a_in_tensor_memory(kind, m, group):
    d = "s32" if kind == "s8" else "f32"
    Mma(kind, operand(kind, start=B_AT), m, 64, group, d, column=32, a_column=8).check()


def test_a_pair_with_m_128_reads_a_from_the_lanes_of_each_half_of_n():
    """The upper 64 lanes are read too: other values there give other results."""
    case = Mma("f16", operand("f16", start=B_AT), 128, 64, 2, column=32)
    t = case.tensor_memory()
    t[:, 64:, :8] = 0
    got = case.run(t)
    cta, lane, column = case.places()
    values = got[cta, lane, column].view(np.float32)
    _, _, c = case.values()
    np.testing.assert_array_equal(values[:, :32], case.want()[:, :32])
    np.testing.assert_array_equal(values[:, 32:], c[:, 32:])


@pytest.mark.parametrize("first", ["f16", "shared"])
def test_m_64_in_the_upper_half_of_each_quarter(first):
    a = operand("f16") if first == "shared" else first
    Mma(a, operand("f16", start=B_AT), 64, 40, lane=16, column=32).check()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("m", "group"), SHAPES)
@pytest.mark.parametrize("accumulate", [0, 1])
def test_k_steps_and_the_first_without_accumulation(m, group, accumulate):
    a, b = operand("f16"), operand("f16", start=B_AT)
    Mma(a, b, m, 64, group, steps=4, accumulate=accumulate).check()


def test_k_steps_of_a_in_tensor_memory():
    Mma("bf16", operand("bf16", start=B_AT), 128, 64, steps=4, column=64).check()


@pytest.mark.parametrize("negate", [1, 2, 3])
def test_negation(negate):
    Mma(operand("bf16"), operand("bf16", start=B_AT), 128, 32, negate=negate).check()


def test_scaled_accumulators():
    Mma(operand("f16"), operand("f16", start=B_AT), 128, 32, scale=3).check()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("m", "group"), SHAPES)
@pytest.mark.parametrize("d", ["f32", "f16"])
def test_disabled_lanes_keep_what_they_hold(m, group, d):
    words = tuple(int(w) for w in np.random.default_rng(4).integers(0, 1 << 32, 4 * group))
    Mma(operand("f16"), operand("f16", start=B_AT), m, 32, group, d, off=words).check()


@pytest.mark.parametrize("order", ["eager", "peer-late", "random"])
def test_orders(order):
    a, b = operand("f16"), operand("f16", start=B_AT)
    Mma(a, b, 256, 64, 2, steps=4).check(order=order, seed=3)


def test_products_of_normal_numbers_are_near_float64():
    case = Mma(operand("bf16"), operand("bf16", start=B_AT), 128, 64, steps=4, accumulate=0)
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(n, 64)).astype(FORMATS["bf16"]) for n in (128, 64))
    case.values = lambda: (a, b, np.zeros((128, 64)))  # type: ignore[method-assign]
    got = case.run()[case.places()].view(np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("accumulate", [0, 1])
def test_every_lane_that_issues_an_mma_computes_the_product(accumulate):
    case = Mma(operand("f16"), operand("f16", start=B_AT), 128, 64, accumulate=accumulate)
    text = case.text().replace("@%p3 tcgen05.mma", "@%p1 tcgen05.mma")
    case.text = lambda: text  # type: ignore[method-assign]
    with pytest.raises(Hazards, match=r"every lane: 32 lanes of .* warp 0 issue this tcgen05.mma"):
        case.run()


def test_columns_that_nothing_has_written_are_not_loaded():
    """As where the MMA is forgotten, or the epilogue loads more columns than it has."""
    case = Mma(operand("f16"), operand("f16", start=B_AT), 128, 64, accumulate=0)
    text = re.sub(r"tcgen05\.st[^;]*;", "", kernel(case.text(), 1, case.width))
    text = re.sub(r"@%p3 tcgen05\.mma[^;]*;", "", text)
    tensors = {"s": aligned(case.shared()), "t": aligned(case.tensor_memory())}
    tensors["t"] = tensors["t"].reshape(-1, case.width)
    with pytest.raises(
        Hazards, match=r"uninitialised: tcgen05.ld of .* warp 0 reads tensor memory"
    ):
        simulate_ptx(text, tensors, Shape(block=128, smem=SMEM + 64), arch="sm_100a")


def test_accumulators_of_f16_that_are_nan_are_written():
    case = Mma(operand("f16"), operand("f16", start=B_AT), 128, 64, d="f16", accumulate=0)
    nans = np.full_like(case.shared().view(np.uint16), 0x7FFF)
    tensors = {"s": aligned(nans.view(np.uint8)), "t": aligned(case.tensor_memory())}
    tensors["t"] = tensors["t"].reshape(-1, case.width)
    text = kernel(case.text(), 1, case.width)
    simulate_ptx(text, tensors, Shape(block=128, smem=SMEM + 64), arch="sm_100a")
    assert (tensors["t"][:, 16:80] & 0xFFFF == 0x7FFF).all()


@pytest.mark.parametrize(("swizzle", "start", "told"), [
    (128, 1024, False), (128, 32, False), (128, 512, True), (64, 256, True), (64, 512, False),
])  # fmt: skip
def test_a_swizzled_operand_starts_where_its_pattern_does(swizzle, start, told):
    case = Mma(operand("f16", swizzle, start=start), operand("f16", start=B_AT), 128, 64)
    text = kernel(case.text(), 1, case.width)
    tensors = {"s": aligned(case.shared()), "t": aligned(case.tensor_memory())}
    tensors["t"] = tensors["t"].reshape(-1, case.width)
    report = simulate_ptx(text, tensors, Shape(block=128, smem=SMEM + 64), arch="sm_100a")
    assert any(a.rule == "descriptor" for a in report.advisories) == told


def test_every_lane_that_issues_a_copy_is_told():
    case = Mma("f16", operand("f16", start=B_AT), 128, 64, a_column=8)
    copy = "@%p1 tcgen05.cp.cta_group::1.128x256b [%r12], %d3; @%p3 tcgen05.commit"
    text = case.text().replace("@%p3 tcgen05.commit", copy)
    case.text = lambda: text  # type: ignore[method-assign]
    with pytest.raises(Hazards, match=r"every lane: 32 lanes of .* warp 0 issue this tcgen05.cp"):
        case.run()


@pytest.mark.parametrize(("column", "right"), [(8, True), (9, False), (20, False), (80, True)])
def test_a_product_is_not_written_over_its_own_a(column, right):
    case = Mma("f16", operand("f16", start=B_AT), 128, 64, column=16, a_column=column)
    if right:
        case.check()
        return
    with pytest.raises(Hazards, match=r"writes tensor memory columns 16\.\.79 and reads tensor"):
        case.run()


# -- weight-stationary ones ------------------------------------------------------------------------

WS = pytest.mark.parametrize("m", [32, 64, 128])


@pytest.mark.sweep(2)
@WS
@pytest.mark.parametrize("n", [64, 128, 256])
def test_ws_lays_its_rows_out_in_all_lanes(m, n):
    Mma(operand("f16"), operand("bf16", start=B_AT, rows=n), m, n, ws=" ", seed=m).check()


@pytest.mark.sweep(3)
@WS
@pytest.mark.parametrize("kind", ["tf32", "e4m3", "s8"])
@pytest.mark.parametrize("collector", [".collector::b0::fill", ".collector::b3::lastuse"])
def test_ws_of_other_kinds(m, kind, collector):
    a, b = operand(kind), operand(kind, start=B_AT)
    Mma(a, b, m, 64, d="s32" if kind == "s8" else "f32", ws=collector, steps=4).check()


@WS
def test_ws_with_a_in_tensor_memory(m):
    """A is there for each share of N, as the accumulator is."""
    Mma("bf16", operand("bf16", start=B_AT, rows=128), m, 128, ws=" ", column=64, steps=4).check()


@WS
def test_ws_whose_b_is_mn_major(m):
    Mma(operand("f16"), operand("f16", 128, True, 64, B_AT), m, 64, ws=" ").check()


@pytest.mark.parametrize(("m", "n"), [(256, 64), (64, 96), (32, 32)])
def test_ws_takes_three_shapes_of_each(m, n):
    case = Mma(operand("f16"), operand("f16", start=B_AT), m, n, ws=" ")
    case.tensor_memory = lambda: np.zeros((1, LANES, case.width), np.uint32)  # type: ignore
    case.shared = lambda: np.zeros((1, SMEM), np.uint8)  # type: ignore[method-assign]
    with pytest.raises(BadOperand, match=rf"mma.ws of M={m}, N={n} .* N in \(64, 128, 256\)"):
        case.run()


def test_ws_with_columns_that_are_zero_is_not_defined():
    case = Mma(operand("f16"), operand("f16", start=B_AT), 64, 64, ws=" ")
    text = case.text().replace("%p4;\n@", "%p4, %d3;\n@")
    case.text = lambda: text  # type: ignore[method-assign]
    with pytest.raises(UnknownInstruction, match="columns of B that are zero"):
        case.run()


# -- refused operands ------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"m": 256, "n": 40, "group": 2}, BadOperand, "M=256, N=40 .* steps of 16"),
        (
            {"a": operand("e4m3"), "b": operand("e4m3", 128, True, 40, B_AT), "n": 40},
            BadOperand,
            "M=128, N=40 .* steps of 16",
        ),
        ({"m": 64, "group": 2}, BadOperand, r"M=64, N=64 .* takes M in \(128, 256\)"),
        ({"m": 256}, BadOperand, r"M=256, N=64 .* takes M in \(64, 128\)"),
        ({"column": 480, "n": 48}, BadAddress, "columns 480..527"),
        ({"lane": 16}, BadOperand, "M=128 in tensor memory from lane 16"),
        ({"saturate": True}, BadOperand, "does not define for kind::f16"),
        (
            {"a": operand("e4m3"), "b": operand("e2m1", 128, True, 64, B_AT)},
            BadOperand,
            "transposes operands of 4 or 6 bits",
        ),
        ({"d": "s32"}, BadOperand, "does not define for kind::f16"),
        ({"b": Layout("f16", 128, sbo=65536 - 1024, start=B_AT)}, BadOperand, "past the CTA's"),
    ],
)
def test_what_hardware_does_not_take(change, error, sentence):
    values = {"a": operand("f16"), "b": operand("f16", start=B_AT), "m": 128, "n": 64}
    case = Mma(**{**values, **change})
    case.tensor_memory = lambda: np.zeros((case.group, LANES, case.width), np.uint32)  # type: ignore
    case.shared = lambda: np.zeros((case.group, SMEM), np.uint8)  # type: ignore[method-assign]
    with pytest.raises(error, match=sentence):
        case.run()


@pytest.mark.parametrize("n", [40, 56])
def test_integers_take_n_in_steps_of_16_beyond_24(n):
    case = Mma(operand("s8"), operand("s8", start=B_AT), 128, n, d="s32")
    with pytest.raises(BadOperand, match=f"N={n} .* steps of 16"):
        case.run()


def test_integers_of_a_pair_take_n_in_steps_of_32():
    case = Mma(operand("s8"), operand("s8", start=B_AT), 256, 48, 2, "s32")
    with pytest.raises(BadOperand, match="steps of 32"):
        case.run()


@pytest.mark.parametrize(("kind", "mn_major"), [("tf32", False), ("f16", True)])
def test_atoms_of_32_bytes_are_for_tf32_that_is_mn_major_alone(kind, mn_major):
    refused(operand(kind), operand(kind, ATOMS_OF_32, mn_major, 32, B_AT))


@pytest.mark.parametrize("swizzle", [0, 128])
def test_tf32_that_is_mn_major_takes_atoms_of_32_bytes_alone(swizzle):
    refused(operand("tf32"), operand("tf32", swizzle, True, 32, B_AT))


def refused(a: Layout, b: Layout) -> None:
    case = Mma(a, b, 128, 32)
    case.shared = lambda: np.zeros((1, SMEM), np.uint8)  # type: ignore[method-assign]
    with pytest.raises(BadOperand, match="MN-major tf32 takes the 128-byte swizzle with atoms of"):
        case.run()


def test_reading_an_accumulator_before_the_commit_is_a_race():
    case = Mma(operand("f16"), operand("f16", start=B_AT), 128, 64)
    text = kernel(case.text(), 1, case.width)
    wait = text[text.index("WAITS:") : text.index("@!%p2 bra WAITS;") + 16]
    arrays = {
        "s": aligned(case.shared()),
        "t": aligned(case.tensor_memory()).reshape(-1, case.width),
    }
    with pytest.raises(Hazards, match=r"reads tensor memory .* still being written by the tcgen05"):
        simulate_ptx(text.replace(wait, ""), arrays, Shape(block=128, smem=SMEM + 64),
                     arch="sm_100a")  # fmt: skip


def ran(case: Mma, text: str) -> str:
    """The findings of a run of the kernel's text, which is an edit of the case's."""
    tensor = aligned(case.tensor_memory()).reshape(-1, case.width)
    shape = Shape(block=128, smem=SMEM + 64)
    with pytest.raises(Hazards) as told:
        simulate_ptx(text, {"s": aligned(case.shared()), "t": tensor}, shape, arch="sm_100a")
    return str(told.value)


def test_columns_that_nothing_has_written_are_not_added_to():
    case = Mma(operand("f16"), operand("f16", start=B_AT), 128, 64)
    text = re.sub(r"tcgen05\.st\.sync[^;]*;", "", kernel(case.text(), 1, case.width))
    assert (
        "uninitialised: tcgen05.mma of CTA (0,0,0) warp 0 adds to tensor memory columns 16..79"
        in (ran(case, text))
    )


def test_operand_a_that_nothing_has_written_to_tensor_memory_is_told():
    case = Mma("f16", operand("f16"), 128, 64, accumulate=0, column=64)
    text = re.sub(r"tcgen05\.st\.sync[^;]*;", "", kernel(case.text(), 1, case.width))
    assert "warp 0 reads operand A from tensor memory columns 0..7, which nothing" in ran(
        case, text
    )


def test_two_threads_issue_their_mmas_in_an_order():
    """What they do is in the order of their issue, which a barrier makes (9.7.16.6.4.3)."""
    case = Mma(operand("f16"), operand("f16", start=B_AT), 128, 64)
    mma, _, commit = case.text().partition("@%p3 tcgen05.commit")
    other = f"setp.eq.u32 %p5, %r10, 32; {mma.replace('@%p3', '@%p5')}"
    at_once, later = (
        kernel(f"{mma} {between} {other} @%p3 tcgen05.commit{commit}", 1, case.width)
        for between in ("", "bar.sync 0;")
    )
    head = ran(case, at_once).split("\n")[1]
    assert "race: the tcgen05.mma of CTA (0,0,0) warp 1 uses tensor memory columns 16..79" in head
    assert head.endswith("nothing orders the one thread before the other")
    assert "nothing orders the one thread" not in ran(case, later)  # but nobody waits for the last


@pytest.mark.parametrize("lane", [0, 16])
def test_m_64_leaves_the_other_half_of_each_quarter_alone(lane):
    """While the MMA is in flight the other 16 lanes may be read, but not its own."""
    case = Mma(operand("f16"), operand("f16", start=B_AT), 64, 32, lane=lane)
    text = case.text()

    def with_load_from(half: int) -> None:
        load = f"add.u32 %r30, %r13, {half << 16 | case.column};"
        load += "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r31}, [%r30];"
        case.text = lambda: text + load  # type: ignore[method-assign]
        case.run()

    with_load_from(16 - lane)
    with pytest.raises(Hazards, match="still being written by the tcgen05"):
        with_load_from(lane)


@pytest.mark.parametrize("form", ["sp.", "ws.sp."])
def test_forms_that_the_simulator_does_not_define_are_named(form):
    case = Mma(operand("f16"), operand("f16", start=B_AT), 128, 64)
    text = case.text().replace("tcgen05.mma.", "tcgen05.mma." + form)
    if form.endswith("sp."):
        text = text.replace("%d3, %r23", "%d3, [%r12], %r23")
    with pytest.raises(SimError) as report:
        simulate_ptx(kernel(text, 1, case.width), {"s": aligned(case.shared()), "t": aligned(
            case.tensor_memory()).reshape(-1, case.width)}, Shape(block=128, smem=SMEM + 64),
            arch="sm_100a")  # fmt: skip
    assert isinstance(report.value, UnknownInstruction) and form[:2] in str(report.value)
