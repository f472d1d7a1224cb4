"""Products of torch with scale factors, which it has on GPUs only: computed on the CPU in float32.

A script's references use them: `torch._scaled_mm` with one factor, one per row, per 128 elements of
K or per 128x128 block, and the block-scaled forms, whose factors stand in the order in which tensor
cores take them (blocks of 128 rows and 4 factors, as 32 rows of 16 bytes); and
`torch._scaled_grouped_mm` with one factor per row. Operands are exact in float32, sums float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch

_ROWS, _FACTORS = 128, 4  # of a block of scale factors
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, by its lower three bits
_PER_FACTOR = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}  # elements of K


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch._scaled_mm: (M, K) times (K, N), each times its factors."""
    product = (
        _scaled(a, scale_a) @ _scaled(b.t(), scale_b.t() if scale_b.dim() == 2 else scale_b).t()
    )
    if bias is not None:
        product = product + bias.float()
    if scale_result is not None:
        product = product * scale_result.float()
    made = product.to(out_dtype or a.dtype)
    return made if out is None else out.copy_(made)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """torch._scaled_grouped_mm: a product for each group, of rows of `a` (2-d times 3-d), of
    columns of `b` (3-d times 2-d), of K (2-d times 2-d), or of both (3-d times 3-d).
    """
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        raise NotImplementedError(
            "torch._scaled_grouped_mm with factors of blocks is not computed on the CPU"
        )
    dtype = out_dtype or torch.bfloat16
    if a.dim() == b.dim():  # groups of K, or one per matrix of the batch
        ends = offs if offs is not None else torch.arange(1, a.shape[0] + 1)
        count = len(ends)
        factors = scale_a.reshape(count, -1), scale_b.reshape(count, -1)
        made = [
            _rowwise(a[:, lo:hi], b[lo:hi], *(f[g] for f in factors))
            if a.dim() == 2
            else _rowwise(a[g], b[g], *(f[g] for f in factors))
            for g, (lo, hi) in enumerate(_ranges(ends))
        ]
        return torch.stack(made).to(dtype)
    out = torch.zeros(a.shape[-2], b.shape[-1], dtype=dtype)
    for g, (lo, hi) in enumerate(_ranges(offs)):
        if a.dim() == 2:
            out[lo:hi] = _rowwise(a[lo:hi], b[g], scale_a[lo:hi], scale_b[g]).to(dtype)
        else:
            out[:, lo:hi] = _rowwise(a[g], b[:, lo:hi], scale_a[g], scale_b[lo:hi]).to(dtype)
    return out


# of torch.nn.functional.scaled_mm: elements of K, and rows, that share a factor
_RECIPES = {2: (16, 1), 3: (32, 1), 4: (128, 1), 5: (128, 128)}
_TENSOR_WISE, _ROW_WISE = 0, 1


def _how(recipes: Sequence[int], swizzles: Sequence[int]) -> list[tuple[int, int]]:
    """Of each scale, its recipe, and whether it stands in the order of tensor cores; by default
    not.
    """
    return list(zip_longest(recipes, swizzles, fillvalue=0))


def _times(
    values: torch.Tensor, scales: Sequence[torch.Tensor], how: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Rows of K elements times each of their scales, float32; ``how``: the recipe of each, and
    whether it stands in the order of tensor cores.
    """
    rows = _four_bits(values) if values.dtype == torch.float4_e2m1fn_x2 else values.float()
    count, k = rows.shape
    for scale, (recipe, swizzled) in zip(scales, how, strict=True):
        if recipe in (_TENSOR_WISE, _ROW_WISE):
            rows = rows * scale.float().reshape(-1, 1)
            continue
        along, down = _RECIPES[recipe]
        shape = -(-count // down), -(-k // along)
        factors = _unblocked(scale, *shape) if swizzled else scale.float().reshape(shape)
        rows = rows * factors.repeat_interleave(down, 0)[:count].repeat_interleave(along, 1)[:, :k]
    return rows


def scaled_mm_v2(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """What torch.nn.functional.scaled_mm calls: (M, K) times (K, N), each times its factors."""
    how_a, how_b = _how(recipe_a, swizzle_a), _how(recipe_b, swizzle_b)
    turned = [
        s.t() if s.dim() == 2 and not w else s for s, (_, w) in zip(scale_b, how_b, strict=True)
    ]
    product = _times(a, scale_a, how_a) @ _times(b.t(), turned, how_b).t()
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype or torch.bfloat16)


def scaled_grouped_mm_v2(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """What torch.nn.functional.scaled_grouped_mm calls: a product for each group of rows of `a`
    (2-d times 3-d), or of K (2-d times 2-d). Each group's factors in the order of tensor cores
    begin with a block of their own.
    """
    if bias is not None:  # which torch refuses on a GPU, too
        raise NotImplementedError("torch.nn.functional.scaled_grouped_mm: a bias is not supported")
    if a.dim() != 2 or offs is None or (b.dim() == 2 and a.dtype == torch.float4_e2m1fn_x2):
        raise NotImplementedError(
            f"torch.nn.functional.scaled_grouped_mm of {a.dim()} by {b.dim()} dimensions and "
            f"{a.dtype} is not computed on the CPU"
        )
    how_a, how_b = _how(recipe_a, swizzle_a), _how(recipe_b, swizzle_b)
    of_a = [_Shares(s, *h) for s, h in zip(scale_a, how_a, strict=True)]
    of_b = [_Shares(s, *h) for s, h in zip(scale_b, how_b, strict=True)]
    made = []
    for g, (lo, hi) in enumerate(_ranges(offs)):
        if b.dim() == 3:
            left, right = a[lo:hi], b[g].t()
            factors = [s.rows(g, lo, hi, _elements(left)) for s in of_a], [s.of(g) for s in of_b]
        else:
            left, right = a[:, lo:hi], b[lo:hi].t()
            factors = (
                [s.columns(g, lo, hi, len(left)) for s in of_a],
                [s.columns(g, lo, hi, len(right)) for s in of_b],
            )
        if hi == lo:
            made.append(torch.zeros(len(left), len(right)))
            continue
        made.append(_times(left, factors[0], how_a) @ _times(right, factors[1], how_b).t())
    out = torch.cat(made) if b.dim() == 3 else torch.stack(made)
    return out.to(out_dtype or torch.bfloat16)


def _elements(rows: torch.Tensor) -> int:
    return rows.shape[1] * (2 if rows.dtype == torch.float4_e2m1fn_x2 else 1)


class _Shares:
    """One scale of an operand of groups, in their order."""

    def __init__(self, scale: torch.Tensor, recipe: int, swizzled: int) -> None:
        self.scale, self.recipe, self.swizzled = scale, recipe, swizzled
        self.taken = 0  # of the factors in the order of tensor cores

    def of(self, g: int) -> torch.Tensor:
        """Those of a matrix of a batch."""
        return self.scale if self.scale.numel() == 1 else self.scale[g]

    def rows(self, g: int, lo: int, hi: int, k: int) -> torch.Tensor:
        """Those of a group of rows."""
        if self.swizzled:
            return self._next(hi - lo, k)
        return self._whole(g) if self.recipe == _TENSOR_WISE else self.scale[lo:hi]

    def columns(self, g: int, lo: int, hi: int, rows: int) -> torch.Tensor:
        """Those of a group of K."""
        if self.swizzled:
            return self._next(rows, hi - lo)
        if self.recipe == _ROW_WISE:  # of each group, one after another
            return self.scale.reshape(-1, rows)[g]
        along = _RECIPES.get(self.recipe, (1, 1))[0]
        return (
            self._whole(g)
            if self.recipe == _TENSOR_WISE
            else self.scale[:, lo // along : -(-hi // along)]
        )

    def _whole(self, g: int) -> torch.Tensor:
        return self.scale if self.scale.numel() == 1 else self.scale.reshape(-1)[g]

    def _next(self, rows: int, k: int) -> torch.Tensor:
        along = _RECIPES[self.recipe][0]
        factors = -(-k // along)
        count = -(-rows // _ROWS) * _ROWS * -(-factors // _FACTORS) * _FACTORS
        first, self.taken = self.taken, self.taken + count
        return self.scale.reshape(-1)[first : first + count]


def _ranges(ends: Any) -> Iterator[tuple[int, int]]:
    last = 0
    for end in ends.tolist():
        yield last, end
        last = end


def _rowwise(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> torch.Tensor:
    return (a.float() * scale_a.reshape(-1, 1)) @ (b.float() * scale_b.reshape(1, -1))


def _scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of K elements times their factors, float32."""
    rows = _four_bits(values) if values.dtype == torch.float4_e2m1fn_x2 else values.float()
    count, k = rows.shape
    per = _PER_FACTOR.get(scale.dtype)
    factors = scale.float() if per is None else _unblocked(scale, count, -(-k // per))
    if factors.numel() == 1:
        return rows * factors.reshape(())
    if factors.dim() == 1:
        factors = factors.reshape(count, -1)
    down, along = (-(-n // m) for n, m in zip((count, k), factors.shape, strict=True))
    spread = factors.repeat_interleave(down, 0)[:count].repeat_interleave(along, 1)[:, :k]
    return rows * spread


def _four_bits(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of e2m1, two in a byte along K, the first in its lower half."""
    raw = packed.contiguous().view(torch.uint8).to(torch.int64)
    codes = torch.stack([raw & 15, raw >> 4], -1).flatten(-2)
    table = torch.tensor([*_FOUR_BITS, *(-x for x in _FOUR_BITS)])
    return table[codes]


def _unblocked(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The factors of (rows, columns), from the order of tensor cores."""
    down, across = -(-rows // _ROWS), -(-columns // _FACTORS)
    flat = scale.t() if scale.dim() == 2 and not scale.is_contiguous() else scale
    blocks = flat.reshape(-1).float().reshape(down, across, 32, 4, _FACTORS)
    lines = blocks.transpose(2, 3).reshape(down, across, _ROWS, _FACTORS)
    whole = lines.permute(0, 2, 1, 3).reshape(down * _ROWS, across * _FACTORS)
    return whole[:rows, :columns]


def _forms(name: str) -> list[Any]:
    """The names under which torch has a function."""
    packet = getattr(torch.ops.aten, name)
    return [getattr(torch, name), packet, *(getattr(packet, o) for o in packet.overloads())]


SCALED: dict[Any, Callable[..., torch.Tensor]] = {
    form: function
    for name, function in (
        ("_scaled_mm", scaled_mm),
        ("_scaled_grouped_mm", scaled_grouped_mm),
        ("_scaled_mm_v2", scaled_mm_v2),
        ("_scaled_grouped_mm_v2", scaled_grouped_mm_v2),
    )
    if hasattr(torch.ops.aten, name)  # NOTE: the last two are newer
    for form in _forms(name)
}
