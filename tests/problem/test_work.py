"""Work by unit, and the least time of each unit."""

from __future__ import annotations

import pytest
from row_sum import RowSumProblem

from cutex.analysis import roofline
from cutex.arch import ARCHS, KINDS, KNOWN, SCALED, arch, mma_kind
from cutex.problem import Work
from cutex.problem.attention import AttentionProblem
from cutex.problem.gemm import GemmProblem
from cutex.problem.layer import LayerProblem
from cutex.results.rate import rate

H200, B200 = arch("sm_90a"), arch("sm_100a")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "dtype", "stated"),
    [
        ("sm_90a", "bf16", 989), ("sm_90a", "e4m3", 1979), ("sm_90a", "e5m2", 1979),
        ("sm_90a", "fp32", 494.5), ("sm_100a", "fp16", 2250), ("sm_100a", "e4m3", 4500),
        ("sm_100a", "e2m1", 4500), ("sm_103a", "e4m3", 4500), ("sm_80", "bf16", 312),
    ],
)  # fmt: skip
def test_each_dtype_has_the_rate_of_its_kind_of_mma(name, dtype, stated):
    assert arch(name).dense_tflops[dtype] == stated


def test_a_rate_belongs_to_a_kind_and_twice_the_elements_to_twice_the_rate():
    kinds = {*KINDS, *SCALED}
    for target in KNOWN.values():
        rates = target.mma_tflops
        assert set(rates) <= kinds and target.fp32_tflops < rates["f16"]
        assert rates["f16"] == pytest.approx(2 * rates["tf32"], rel=0.01)
        for wide, narrow in (("f16", "f8f6f4"), ("mxf8f6f4", "mxf4nvf4")):
            if narrow in rates:
                assert rates[narrow] >= 1.99 * rates[wide]
    assert "i8" not in arch("sm_103a").mma_tflops and "f8f6f4" not in arch("sm_80").mma_tflops


def test_a_kind_is_found_by_dtype_with_scale_factors_or_without():
    assert (mma_kind("fp16"), mma_kind("e5m2"), mma_kind("fp32")) == ("f16", "f8f6f4", "tf32")
    assert (mma_kind("e4m3", scaled=True), mma_kind("e2m1", scaled=True)) == (
        "mxf8f6f4", "mxf4nvf4",
    )  # fmt: skip
    with pytest.raises(ValueError, match="no MMA takes bf16 with scale factors"):
        mma_kind("bf16", scaled=True)
    with pytest.raises(ValueError, match="no MMA takes e8m0"):
        mma_kind("e8m0")


def test_the_least_time_of_each_unit_is_its_work_over_its_rate():
    work = Work({"f16": 989e6, "f8f6f4": 2 * 1979e6}, 67e6, 0.0, {"hbm": 4.8e6, "l2": 0.0})
    assert work.us(H200) == pytest.approx({"tensor cores": 3.0, "FMA pipes": 1.0, "memory": 1.0})
    assert work.binding(H200) == "tensor cores"
    assert work.peak_tflops(H200) == pytest.approx(work.flops / 3e6)
    assert Work(bytes={"hbm": 1}).peak_tflops(H200) is None
    assert Work({"f8f6f4": 1e12}, bytes={"hbm": 8}).binding(arch("sm_80")) == "memory"
    assert Work().binding(H200) is None
    one_a_cycle = Work(exponentials=16 * 132 * H200.clock_hz / 1e6)
    assert one_a_cycle.us(H200) == pytest.approx({"exponentials": 1.0})
    l2 = Work(bytes={"l2": H200.l2_bytes_per_clock * H200.clock_hz / 1e6})
    assert l2.us(H200) == pytest.approx({"L2": 1.0})


def test_a_problem_of_eight_bits_is_rated_by_the_rate_of_eight_bits():
    wide, narrow = (LayerProblem(4096, 8192, 8192, dtype=t) for t in ("bf16", "e4m3"))
    for target in ARCHS.values():
        us = {t.dtype: t.needs.us(target)["tensor cores"] for t in (wide, narrow)}
        assert us["bf16"] == pytest.approx(2 * us["e4m3"], rel=0.001)
    assert narrow.needs.mma == {"f8f6f4": narrow.flops}


def test_attention_needs_an_exponential_for_each_score_that_is_seen():
    full = AttentionProblem(2, 256, 512, 4, 2, 64, 64)
    assert full.needs.exponentials == 2 * 4 * 256 * 512
    causal = AttentionProblem(1, 128, 128, 1, 1, 64, 64, causal=True)
    assert causal.needs.exponentials == 128 * 128 / 2  # as its FLOPs are counted
    assert causal.needs.mma == {"f16": causal.flops}
    us = AttentionProblem(1, 4096, 4096, 16, 16, 64, 64).needs.us(B200)
    assert us["exponentials"] == pytest.approx(2 * us["tensor cores"])  # 8192 FLOP, 16 a cycle


def test_without_mmas_the_other_units_are_the_limits(capsys):
    small = RowSumProblem(8192, 4096, dtype="fp32")
    assert small.needs.binding(H200) == "memory"
    assert rate(small, "sm_90a", 30.0).unit == "GB/s"
    with_much = rate(Heavy(64, 64), "sm_90a", 2.0)
    assert (with_much.unit, with_much.peak) == ("TFLOPS", pytest.approx(67.0))
    found = roofline.limits(small, roofline.gpu("h100"))
    assert [x.resource for x in found if x.stated] == ["FMA pipes", "memory"]
    assert found[1].us == pytest.approx(small.bytes / 3350e3)


class Heavy(RowSumProblem):
    """The same with much more work for each element."""

    flops = property(lambda self: 10**9)


def test_what_eight_bit_kernels_reached_is_no_ceiling_for_sixteen():
    assert roofline.reached(roofline.gpu("b200"), [], "f8f6f4") is None
    assert roofline.reached(roofline.gpu("b200"), []).rate == 1723
    limits = roofline.limits(GemmProblem(8192, 8192, 8192), roofline.gpu("b200"))
    assert [x.stated for x in limits] == [True, True, False, False]
