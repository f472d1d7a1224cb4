"""Packing of 4-bit codes, scales and zeros into blocks (layout.py), and the reverse, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cutex.dtypes import DTYPES
from cutex.problem.scaled.quantization import magnitudes
from cutex.problem.w4.layout import (
    BLOCK_K,
    CODE_WORDS,
    DEFAULT_ZERO,
    E2M1_PLACES,
    E2M1_UNIT,
    INTEGER_BASE,
    STRIP,
    TOP_SCALE,
    W4Format,
    word_dtype,
)

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# a code's place: (STRIP, warp, half of 16 rows, row of 8, BLOCK, half of K, wgmma, half of 16,
# pair of 8, element of a pair) of rows and K, and the order in which a block has them
_SIZES_OF_ROW, _SIZES_OF_K = (4, 2, 8), (2, 4, 2, 4, 2)
_ORDER = (0, 4, 5, 1, 3, 8, 6, 9, 7, 2)


def pack(codes: Tensor, scales: Tensor | None, zeros: Tensor | None, of: W4Format) -> Tensor:
    """The blocks (strips, blocks of K, words), of word_dtype.

    codes (N, K): uint8, 0 to 15. scales (N, K / group): bfloat16 or float16, as the kernel
    multiplies them. zeros (N, K / group): codes that count as 0.
    """
    n, k = codes.shape
    strips, blocks = -(-n // STRIP), -(-k // BLOCK_K)
    pad = DEFAULT_ZERO if of.kind == "int4" else 0
    more = 0, blocks * BLOCK_K - k, 0, strips * STRIP - n
    whole = torch.nn.functional.pad(codes.to(torch.uint8), more, value=pad)
    shape = strips, *_SIZES_OF_ROW, blocks, *_SIZES_OF_K
    nibbles = whole.reshape(shape).permute(_ORDER).reshape(strips, blocks, -1, 2)
    bytes_ = nibbles[..., 0] | nibbles[..., 1] << 4  # (strips, blocks, 4096)
    if of.kind == "fp4" and scales is not None and scales.dtype is torch.bfloat16:
        bytes_ = _moved(bytes_, dict(enumerate(E2M1_PLACES)))
    parts = [bytes_]
    if of.group:
        assert scales is not None
        parts.append(_by_pairs(scales, of, strips, blocks, 0.0))
    if of.zeros:
        assert zeros is not None and scales is not None
        base = INTEGER_BASE[NAMES[scales.dtype]]
        parts.append(_by_pairs((zeros + base).to(scales.dtype), of, strips, blocks, base))
    made_for = torch.bfloat16 if scales is None else scales.dtype
    return torch.cat(parts, -1).contiguous().view(words_of(of, made_for))


def words_of(of: W4Format, dtype: torch.dtype) -> torch.dtype:
    """The type of the words of a weight packed for activations of `dtype`."""
    return DTYPES[word_dtype(of, NAMES[dtype])].torch


def _moved(words: Tensor, places: dict[int, int]) -> Tensor:
    """Words of 32 bits, as bytes, whose bit b is moved to places[b]."""
    whole = words.contiguous().view(torch.int32)
    moved = torch.zeros_like(whole)
    for bit, place in places.items():
        moved |= ((whole >> bit) & 1) << place
    return moved.view(torch.uint8)


def _by_pairs(x: Tensor, of: W4Format, strips: int, blocks: int, pad: float) -> Tensor:
    """Numbers of 16 bits for each row and group, (N, groups), as bytes (strips, blocks, ..)."""
    more = 0, blocks * of.groups - x.shape[1], 0, strips * STRIP - x.shape[0]
    whole = torch.nn.functional.pad(x, more, value=pad)
    shaped = whole.reshape(strips, *_SIZES_OF_ROW, blocks, of.groups)
    ordered = shaped.permute(0, 4, 1, 3, 5, 2).contiguous()  # (.., warp, row, group, half)
    return ordered.view(torch.uint8).reshape(strips, blocks, -1)


def unpack(
    packed: Tensor, n: int, k: int, of: W4Format, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The reverse of `pack`: codes (n, k), scales and zeros (n, K / group), or None."""
    strips, blocks, _ = packed.shape
    nibble_shape = [(strips, *_SIZES_OF_ROW, blocks, *_SIZES_OF_K)[i] for i in _ORDER]
    words = packed[..., :CODE_WORDS].contiguous().view(torch.uint8)
    if of.kind == "fp4" and dtype is torch.bfloat16:
        words = _moved(words, {place: bit for bit, place in enumerate(E2M1_PLACES)})
    nibbles = torch.stack((words & 15, words >> 4), -1).reshape(nibble_shape)
    back = [_ORDER.index(i) for i in range(len(_ORDER))]
    codes = nibbles.permute(back).reshape(strips * STRIP, blocks * BLOCK_K)[:n, :k]
    found: list[Tensor | None] = []
    for number in range(2):
        begin = CODE_WORDS + number * of.factor_words
        part = packed[..., begin : begin + of.factor_words]
        if not of.group or (number and not of.zeros):
            found.append(None)
            continue
        shape = strips, blocks, 4, 8, of.groups, 2
        values = part.contiguous().view(dtype).reshape(shape).permute(0, 2, 5, 3, 1, 4)
        values = values.reshape(strips * STRIP, blocks * of.groups)
        found.append(values[:n, : -(-k // of.group)])
    if found[1] is not None:
        found[1] = found[1] - INTEGER_BASE[NAMES[dtype]]
    return codes, found[0], found[1]


def has_larger_scales(packed: Tensor, of: W4Format) -> bool:
    """Whether a finite scale of integers packed for bfloat16 exceeds TOP_SCALE. Waits for the
    device."""
    words = packed[..., CODE_WORDS : CODE_WORDS + of.factor_words].contiguous()
    scales = words.view(torch.bfloat16).float().abs()
    return bool((scales.isfinite() & (scales > TOP_SCALE)).any())


def values(packed: Tensor, n: int, k: int, of: W4Format, dtype: torch.dtype) -> Tensor:
    """The numbers (n, k) of `dtype` that the kernel multiplies, exactly, in float32."""
    codes, scales, zeros = unpack(packed, n, k, of, dtype)
    if of.kind == "int4":
        less = DEFAULT_ZERO if zeros is None else _of_each(zeros.float(), of, k)
        x = codes.float() - less
    else:
        size = magnitudes(codes & 7)
        x = torch.where(codes >= 8, -size, size)
        if scales is not None:  # exact: its scales have a factor of the codes' unit
            scaled = _of_each(scales.double(), of, k) * 2.0 ** -E2M1_UNIT[NAMES[dtype]]
            return (x.double() * scaled).to(dtype).float()
    return x if scales is None else (x * _of_each(scales.float(), of, k)).to(dtype).float()


def _of_each(x: Tensor, of: W4Format, k: int) -> Tensor:
    """Numbers of groups (n, groups) as those of elements (n, k)."""
    return x.repeat_interleave(of.group, 1)[:, :k]
