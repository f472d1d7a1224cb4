"""The memory layouts of scale factors.

Plain: (rows, factors along K), row-major; of 1x128 blocks the rows are contiguous instead, with a
pitch of whole units of 16 bytes, as DeepGEMM and cuBLASLt take them.

Swizzled, which cuBLASLt, CUTLASS and torch (SWIZZLE_32_4_4) call 128x4 or blocked: tiles of 128
rows by 4 factors, 512 bytes each, K tiles fastest; the factor of row r and column c of a tile is at
byte 16 (r mod 32) + 4 (r div 32) + c. Rows and columns that are padding hold zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutex.problem.scaled.formats import SWIZZLE_FACTORS, SWIZZLE_ROWS, Format

PITCH = 4  # fp32 factors in 16 bytes


def swizzled_shape(rows: int, columns: int) -> tuple[int, int, int, int, int]:
    """The shape of `swizzle`'s result: tiles of rows, tiles of K, and the bytes of a tile as (row
    mod 32, row div 32, column)."""
    return -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_FACTORS), 32, 4, SWIZZLE_FACTORS


def swizzle(scales: Tensor) -> Tensor:
    """Scale factors (.., rows, columns) of one byte each in the swizzled layout, contiguous, of
    shape (.., *swizzled_shape); flattened, it is what torchao's `to_blocked` gives."""
    *batch, rows, columns = scales.shape
    down, along, *_ = swizzled_shape(rows, columns)
    shape = (*batch, down * SWIZZLE_ROWS, along * SWIZZLE_FACTORS)
    padded = torch.zeros(shape, dtype=torch.uint8, device=scales.device)
    padded[..., :rows, :columns] = scales.view(torch.uint8)
    tiles = padded.reshape(*batch, down, 4, 32, along, SWIZZLE_FACTORS)
    order = [d + len(batch) for d in (0, 3, 2, 1, 4)]
    tiles = tiles.permute(*range(len(batch)), *order).contiguous()
    return tiles.view(scales.dtype)


def unswizzle(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The scale factors (rows, columns), row-major, of one swizzled matrix of any shape."""
    down, along, *rest = swizzled_shape(rows, columns)
    tiles = scales.contiguous().view(torch.uint8).reshape(down, along, *rest)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(down * SWIZZLE_ROWS, along * SWIZZLE_FACTORS)
    return plain[:rows, :columns].contiguous().view(scales.dtype)


def rows_contiguous(scales: Tensor) -> Tensor:
    """The fp32 scale factors (.., rows, columns) with contiguous rows, of strides (.., 1, pitch),
    the pitch a multiple of 16 bytes; what lies between columns is NaN."""
    *batch, rows, columns = scales.shape
    shape = *batch, columns, -(-rows // PITCH) * PITCH
    memory = torch.full(shape, torch.nan, dtype=scales.dtype, device=scales.device)
    memory[..., :rows] = scales.mT
    return memory[..., :rows].mT


def stored(scales: Tensor, format: Format) -> Tensor:
    """Plain scale factors (rows, columns) in the layout that the kernels of `format` read."""
    if format.swizzled:
        return swizzle(scales)
    return rows_contiguous(scales) if format.block[0] == 1 and format.block[1] else scales


def plain(scales: Tensor, format: Format, rows: int, k: int) -> Tensor:
    """The reverse of `stored` for an operand (rows, k)."""
    return unswizzle(scales, *format.factors(rows, k)) if format.swizzled else scales


def words(scales: Tensor) -> Tensor:
    """Swizzled scale factors of one matrix, or of a batch (L, ..), as tensor cores' kernels are
    given them: 32-bit words (L, tiles of rows, tiles of K, 128)."""
    *batch, down, along, _, _, _ = scales.shape
    return scales.view(torch.uint8).view(*(batch or [1]), down, along, 512).view(torch.int32)
