"""The Blackwell tiling of MLA decode: pairs of CTAs with 128 packed rows, 64 each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutex.kernels.attention.mla.config import CHUNK, ELEMENT, HEAD_DIM, MlaConfig

CTAS = 2  # of a pair
ROWS = 128  # of a pair's MMA: 64 of each CTA, and half of the columns in the upper lanes
CTA_ROWS = ROWS // CTAS
KEYS = 128  # of a block
KEYS_OF_CTA = KEYS // CTAS  # that a CTA has as K
BOX = 32  # keys of a slot of V, and of a box
DIMS = 256  # of a product of P and V: 128 of each CTA
SLOTS = 17  # of K and of V: a block's 9 of K and 8 of V


@dataclass(frozen=True)
class Sm100MlaConfig(MlaConfig):
    """The tiling: 128 keys at a time, of which each CTA has half as K, and all as half of V's
    columns, in slots of 8 KB that K and V share."""

    num_sms: int = 148

    rescale_threshold: ClassVar[float] = 30.0  # fp16: 15
    tile_m: ClassVar[int] = ROWS
    tile_n: ClassVar[int] = KEYS
    ctas_of_part: ClassVar[int] = CTAS
    # of a CTA
    q_bytes: ClassVar[int] = CTA_ROWS * HEAD_DIM * ELEMENT
    p_bytes: ClassVar[int] = CTA_ROWS * KEYS * ELEMENT
    slot_bytes: ClassVar[int] = KEYS_OF_CTA * CHUNK * ELEMENT  # or BOX * DIMS / CTAS of V
    smem_bytes: ClassVar[int] = q_bytes + p_bytes + slot_bytes * SLOTS
    # the first column of tensor memory after two blocks of S, half of whose keys are in the upper
    # lanes
    o_column: ClassVar[int] = 2 * KEYS_OF_CTA
