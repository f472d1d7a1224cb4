"""Rotary position embedding of the queries and the new keys of a call with a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cutex.ops.attention.call import DTYPES
from cutex.ops.number import check_flag
from cutex.ops.plain import check_strided
from cutex.ops.row.rope import rope

FP8_MAX = 448.0  # of e4m3; more would be rounded to NaN


def rotated(
    q: Tensor,
    k: Tensor | None,
    tables: tuple[Tensor | None, Tensor | None],
    interleaved: bool,
    lengths: Tensor | None,
    aligned: bool,
    ends: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """q and k, each row turned by its position: new key i of a sequence is at `lengths` + i, and so
    is query i if queries are `aligned` with keys, by a causal mask or a window; else they are at
    `lengths`, as in FlashAttention. `ends`: cu_seqlens of packed queries and new keys. float8 is
    turned in float32, and saturates."""
    check_flag("rotary_interleaved", interleaved)
    cos, sin = tables
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    cos, sin = (x.half() if _is_fp8(x) else x for x in (cos, sin))  # which holds every e4m3
    if not (isinstance(k, Tensor) and isinstance(lengths, Tensor)):
        raise ValueError("rotary_cos and rotary_sin need k and v, and cache_seqlens: their places")
    given = {"q": q, "k": k, "cache_seqlens": lengths}
    given |= dict(zip(("cu_seqlens_q", "cu_seqlens_k_new"), ends, strict=True))
    for name, x in given.items():
        if x is not None or name == "q":
            check_strided(name, x)
            if x.device != q.device:
                raise ValueError(f"{name} is on {x.device}, but q is on {q.device}")
    for name, x, of in (("q", q, ends[0]), ("k", k, ends[1])):
        if x.dtype not in DTYPES and not _is_fp8(x):
            raise TypeError(
                f"{name} has dtype {x.dtype}: rotary_cos turns bfloat16, float16 and float8_e4m3fn"
            )
        batch = len(lengths) if lengths.dim() else -1
        begins = (x if of is None else of).shape
        fits = len(begins) > 0 and begins[0] == batch + (of is not None)
        if x.dim() != (4 if of is None else 3) or lengths.dim() != 1 or not fits:
            raise ValueError(
                f"rotary_cos: {name} of shape {tuple(x.shape)} must be of as many sequences as "
                f"there are cache_seqlens, {tuple(lengths.shape)}"
            )
    places: Tensor | None = None  # of both
    if ends[0] is None and ends[1] is None and q.shape[1] == k.shape[1]:
        places = _dense(q, lengths, True) if aligned or q.shape[1] == 1 else None
    if places is not None and (heads := _as_one(q, k)) is not None:
        turned = rope(heads, cos, sin, interleaved=interleaved, positions=places)
        return turned[:, :, : q.shape[2]], turned[:, :, q.shape[2] :]
    found = []
    for x, of, follow in ((q, ends[0], aligned), (k, ends[1], True)):
        rows, at = (x, places) if of is None else (x[None], _packed(x, of, lengths, follow))
        at = _dense(x, lengths, follow) if at is None else at
        rows = rows.float() if _is_fp8(x) else rows
        turned = rope(rows, cos, sin, interleaved=interleaved, positions=at)
        turned = turned.clamp(-FP8_MAX, FP8_MAX).to(x.dtype) if _is_fp8(x) else turned
        found.append(turned if of is None else turned[0])
    return found[0], found[1]


def _is_fp8(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn


def _as_one(q: Tensor, k: Tensor) -> Tensor | None:
    """The heads of q and then those of k as one tensor, where they follow one another in memory, as
    the parts of one product do."""
    alike = q.dtype == k.dtype and q.shape[:2] == k.shape[:2] and q.stride() == k.stride()
    if not alike or q.shape[3] != k.shape[3] or _is_fp8(q):
        return None
    begin, heads = q.storage_offset(), (*q.shape[:2], q.shape[2] + k.shape[2], q.shape[3])
    follows = k.storage_offset() == begin + q.shape[2] * q.stride(2)
    if not follows or q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return None
    return q.as_strided(heads, q.stride(), begin)


def _dense(x: Tensor, lengths: Tensor, follow: bool) -> Tensor:
    """The positions (batch, rows) of x (batch, rows, heads, D)."""
    if x.shape[1] == 1:
        return lengths[:, None]
    steps = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    return lengths[:, None] + (steps if follow else torch.zeros_like(steps))


def _packed(x: Tensor, ends: Tensor, lengths: Tensor, follow: bool) -> Tensor:
    """The positions (1, rows) of x (rows, heads, D); of rows of no sequence they are 0."""
    rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), rows, right=True)
    mine = sequence.clamp(max=max(len(lengths) - 1, 0))
    at = lengths[mine] + (rows - ends[mine] if follow else 0)
    return at.where(sequence < len(lengths), 0)[None]
