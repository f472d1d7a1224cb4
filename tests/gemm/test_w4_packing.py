"""The packing of weights of 4 bits: its reverse, its layout, what it rounds, older weights."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import pickle
from typing import Any

import pytest
import torch
from w4_formats import FORMATS

import cutex
from cutex import ops
from cutex.ops.w4.packed import W4Weight
from cutex.problem.w4 import packing
from cutex.problem.w4.layout import LAYOUT_VERSION, W4Format

bf16, fp16 = torch.bfloat16, torch.float16


@pytest.mark.sweep(3)
@pytest.mark.parametrize("of", FORMATS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (72, 192), (1, 32)])
def test_packing_has_a_reverse(of: W4Format, n: int, k: int) -> None:
    groups = -(-k // of.group) if of.group else 0
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = torch.randn(n, groups).to(bf16) if groups else None
    zeros = torch.randint(0, 16, (n, groups)) if of.zeros else None
    packed = packing.pack(codes, scales, zeros, of)
    assert packed.numel() * 4 == of.bytes(n, k)
    found = packing.unpack(packed, n, k, of, bf16)
    assert torch.equal(found[0], codes)
    assert scales is None or torch.equal(found[1], scales)
    assert zeros is None or torch.equal(found[2].int(), zeros.int())


def test_scales_that_bf16_has_no_room_for_have_a_factor_of_their_row() -> None:
    codes, scales = torch.randint(0, 16, (72, 256)), torch.rand(72, 2) + 1
    for top, alone in ((128.0, True), (2.0**20, False)):
        scales[:3] *= top
        packed = cutex.pack_w4((codes, scales), group_size=128, dtype=bf16)
        assert (packed.factor is None) is alone
        want = (codes - 8) * scales.to(bf16).float().repeat_interleave(128, 1)
        assert torch.equal(packed.dequantize(torch.float32), want.to(bf16).float())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [bf16, fp16])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_fp4_is_packed_without_a_rounding(kind: str, dtype: torch.dtype) -> None:
    w = torch.randn(72, 128) * torch.exp2(torch.randint(-6, 7, (72, 128)).float())
    with ops.simulated("sm_100a"):
        q = cutex.quantize(w, kind)
    packed = cutex.pack_w4(q, dtype=dtype)
    want = cutex.dequantize(q, torch.float64)
    assert torch.equal(packed.dequantize(torch.float64), want)
    assert torch.equal(cutex.pack_w4(w, kind=kind, dtype=dtype).packed, packed.packed)


# of the words of one weight, by format and dtype of activations
LAYOUTS = {
    (W4Format(), bf16): "952c193d9122f497",
    (W4Format("int4", 0), fp16): "f8f4bbdde32f760c",
    (W4Format("int4", 32, True), bf16): "505673e7b900bb1e",
    (W4Format("int4", 64, True), fp16): "03a74bb95e0b1a20",
    (W4Format("fp4", 16), bf16): "41a86e4f29a16cb8",
    (W4Format("fp4", 32), bf16): "0b8e222b4e77d43d",
    (W4Format("fp4", 16), fp16): "022ba16f46b121cd",
}


@pytest.mark.parametrize(("of", "dtype"), LAYOUTS, ids=str)
def test_another_layout_has_another_version(of: W4Format, dtype: torch.dtype) -> None:
    """What was packed and saved is read by later code: a sum that differs is a layout that differs,
    and LAYOUT_VERSION with it."""
    n, k = 72, 256
    codes = (torch.arange(n * k) * 7 % 61 % 16).view(n, k)
    number = torch.arange(n * (k // of.group)).view(n, -1) if of.group else None
    scales = None if number is None else (number % 50 + 64).to(dtype)
    zeros = None if number is None or not of.zeros else number * 5 % 16
    words = packing.pack(codes, scales, zeros, of)
    found = hashlib.sha256(words.numpy().tobytes()).hexdigest()[:16]
    assert (LAYOUT_VERSION, found) == (3, LAYOUTS[of, dtype])


class Pickled:
    """A weight as code without versions pickled it."""

    def __init__(self, w: W4Weight) -> None:
        self.w = w

    def __reduce__(self) -> tuple[Any, ...]:
        return W4Weight, (self.w.packed.view(torch.int32), *self.w[1:7])


@pytest.mark.parametrize("through", ["pickle", "torch.save", "weights only", "copy.deepcopy"])
def test_a_weight_saved_without_a_version_is_read_where_all_layouts_are_alike(through: str) -> None:
    def back(w: Any) -> W4Weight:
        if through in ("torch.save", "weights only"):
            torch.save({"layer.weight": w}, file := io.BytesIO())
            file.seek(0)
            return torch.load(file, weights_only=through == "weights only")["layer.weight"]
        return pickle.loads(pickle.dumps(w)) if through == "pickle" else copy.deepcopy(w)

    for kind, dtype, read in (
        ("int4", bf16, True), ("uint4", fp16, True), ("nvfp4", fp16, True),
        ("mxfp4", bf16, False), ("nvfp4", bf16, False),
    ):  # fmt: skip
        w = cutex.pack_w4(torch.randn(72, 256), kind=kind, dtype=dtype)
        assert back(w).layout_version == w.layout_version == LAYOUT_VERSION
        assert torch.equal(back(w).dequantize(), w.dequantize())
        old = back(Pickled(w))
        assert old.layout_version == 0
        if read:
            assert torch.equal(old.dequantize(), w.dequantize())
            continue
        for use in (old.dequantize, lambda old=old: cutex.matmul(torch.ones(3, 256).to(bf16), old)):
            with pytest.raises(ValueError, match=r"no layout version, .* pack the weight again"):
                use()


def test_older_weights_with_scales_that_kernels_make_infinite_are_refused() -> None:
    codes, x = torch.arange(72 * 256).view(72, 256) % 16, torch.ones(3, 256, dtype=bf16)
    for scale, is_read in ((256.0, True), (math.nan, True), (260.0, False), (-3e38, False)):
        scales = torch.ones(72, 2)
        scales[70, 1] = scale
        of = W4Format("int4", 128)
        packed = packing.pack(codes, scales.to(bf16), None, of)
        for version in (0, 1, 2):
            old = W4Weight(packed, None, 72, 256, of, bf16, "int4", version)
            if is_read:
                old.check("b")
                continue
            for use in (old.dequantize, lambda old=old: cutex.matmul(x, old)):
                with pytest.raises(ValueError, match=r"scales above 256 and no factor, .* again"):
                    use()


@pytest.mark.parametrize("planned", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_older_words_are_refused_in_whatever_weight_they_are_put(kind: str, planned: bool) -> None:
    """Code before had words of int32 in both layouts of fp4 for bfloat16."""
    w = cutex.pack_w4(torch.randn(72, 256), kind=kind, dtype=bf16)
    old = w.packed.view(torch.int32)
    x = torch.randn(3, 256, dtype=bf16)
    with ops.simulated("sm_90a"):
        if planned:
            cutex.matmul(x, w)
        for made in (
            w._replace(packed=old),
            W4Weight(old, *w[1:]),
            W4Weight._make([old, *w[1:]]),
            pickle.loads(pickle.dumps(w._replace(packed=old))),
            W4Weight(**{**w._asdict(), "packed": old}),
        ):
            for use in (made.dequantize, lambda made=made: cutex.matmul(x, made)):
                with pytest.raises(ValueError, match=r"words of uint32 .* pack the weight again"):
                    use()
    moved = w._replace(packed=w.packed.clone().to("cpu").contiguous())
    assert torch.equal(moved.dequantize(), w.dequantize())


def test_codes_in_pairs_and_scales_beyond_fp16() -> None:
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    scales = torch.rand(8, 2) * 1e-9
    zeros = torch.randint(0, 16, (8, 2))
    whole = cutex.pack_w4((codes, scales, zeros), group_size=32, dtype=fp16)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    assert torch.equal(cutex.pack_w4((pairs, scales, zeros), group_size=32, dtype=fp16).packed,
                       whole.packed)  # fmt: skip
    each = scales.repeat_interleave(32, 1)
    want = (codes.double() - zeros.repeat_interleave(32, 1)) * each.double()
    assert (whole.dequantize(torch.float64) - want).abs().max() <= 2.0**-9 * want.abs().max()


@pytest.mark.parametrize(("kind", "group"), [("int4", 64), ("uint4", 128), ("int4", None)])
def test_quantization_is_off_by_half_a_step(kind: str, group: int | None) -> None:
    w = torch.randn(64, 256) + 0.5
    error = (cutex.pack_w4(w, kind=kind, group_size=group).dequantize(torch.float32) - w).abs()
    groups, size = w.view(64, -1, group or 256), error.view(64, -1, group or 256).amax(-1)
    if kind == "uint4":
        step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    else:
        step = groups.abs().amax(-1) / 7.5
    assert (size <= 1.02 * step / 2 + 2.0**-6 * groups.abs().amax(-1)).all()
    w[3, 70] = torch.nan
    group = group or 256
    lost = cutex.pack_w4(w, kind=kind, group_size=group).dequantize().isnan().view(64, -1, group)
    assert lost.all(-1).nonzero().tolist() == [[3, 70 // group]] and lost.sum() == group
