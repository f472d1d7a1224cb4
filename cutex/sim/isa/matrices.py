"""Operands of tensor-core instructions in shared memory: descriptors, layouts, element types.

Layouts (PTX ISA 9.7.16.3), in chunks of 16 bytes, with W = 1, 2, 4, 8 chunks per swizzle row:
K-major, row r, chunk c of K:      (r % 8) * W + (r // 8) * SBO + c
    without swizzle:               (r % 8) * W + (r // 8) * SBO + c * LBO
MN-major, chunk c along MN, k:     (k % 8) * W + (k // 8) * SBO + c % W + (c // W) * LBO
    without swizzle:               c * SBO + k % 8 + (k // 8) * LBO
    128 bytes of 32-byte atoms:    (k % 4) * 8 + (k // 4) * SBO + c % 8 + (c // 8) * LBO
The swizzle then XORs the absolute chunk number. The last is of Blackwell, and the only one for tf32
that is MN-major (CUTLASS: SWIZZLE_128B_BASE32B).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa.tensormap import ATOMS_OF_32, SWIZZLES, swizzle_chunks
from cutex.sim.machine.operation import CHUNK, Span
from cutex.sim.numerics.rounding import bf16_to_f32
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


@dataclass(frozen=True)
class Descriptor:
    """A matrix descriptor, in byte offsets; ``bits`` of swizzle: 0 none, 1, 2, 3 for 32, 64, 128
    bytes, ATOMS_OF_32. ``next``: where K-major rows go on behind their 128 bytes, at other rows of
    128 bytes, which sm_103a takes instead of a leading offset.
    """

    start: int
    leading: int
    stride: int
    bits: int
    next: int | None = None

    def __str__(self) -> str:
        return (
            f"start 0x{self.start:x}, leading {self.leading}, stride {self.stride}, "
            f"{SWIZZLES[self.bits]} swizzle"
        )


def read_descriptor(value: int, blackwell: bool, ins: Instruction) -> Descriptor:
    """Decode a 64-bit matrix descriptor (9.7.16.4.1; wgmma 9.7.15.5.1). Raises BadOperand."""
    found = _decoded(value, blackwell)
    if isinstance(found, str):
        raise BadOperand.at(ins, found)
    return found


@lru_cache(maxsize=4096)
def _decoded(value: int, blackwell: bool) -> Descriptor | str:
    """The descriptor, or a sentence on what is wrong with it."""
    if blackwell:
        mode, fixed = value >> 61 & 7, value >> 46 & 7
        if fixed != 1:
            return f"bits 46-48 of the descriptor 0x{value:016x} are {fixed}, not 1"
        bits = {0: 0, 1: ATOMS_OF_32, 2: 3, 4: 2, 6: 1}.get(mode)
        base = value >> 49 & 7
        absolute = bool(value >> 52 & 1)
    else:
        absolute = False
        bits = {0: 0, 1: 3, 2: 2, 3: 1}[value >> 62 & 3]
        base = value >> 49 & 7
    if bits is None or base:
        return (
            f"descriptor 0x{value:016x} with a layout or base offset that the simulator does not "
            "define"
        )
    start, leading, stride = ((value >> low & 0x3FFF) << 4 for low in (0, 16, 32))
    return Descriptor(start, leading, stride, bits, leading if absolute else None)


def operand_chunks(
    desc: Descriptor, rows: int, k_bytes: int, mn_major: bool, itemsize: int
) -> np.ndarray:
    """The absolute chunk numbers of an operand: K-major (rows, k_bytes / 16), MN-major (K, rows *
    itemsize / 16).
    """
    width, steps = (8, 4) if desc.bits == ATOMS_OF_32 else (1 << desc.bits, 8)
    lead, stride, start = desc.leading >> 4, desc.stride >> 4, desc.start >> 4
    if not mn_major:
        r, c = np.arange(rows)[:, None], np.arange(k_bytes // 16)[None, :]
        at = r % 8 * width + r // 8 * stride + (c if desc.bits else c * lead)
        if desc.next is not None:  # from the end of the row of 128 bytes on
            beyond = start % 8 + c >= 8
            at = at + np.where(beyond, (desc.next >> 4) - (start - start % 8) - 8, 0)
    else:
        k, c = np.arange(k_bytes // itemsize)[:, None], np.arange(rows * itemsize // 16)[None, :]
        if desc.bits:
            at = k % steps * width + k // steps * stride + c % width + c // width * lead
        else:
            at = c * stride + k % 8 + k // 8 * lead
    return swizzle_chunks(start + at, desc.bits)


Shape = tuple[Descriptor, int, int, bool, int]  # the arguments of `operand_chunks`
_numbers: dict[object, int] = {}


class Extent:
    """The chunks of an operand, or of a part of it, in any CTA's shared memory; ``number``
    identifies the set of chunks.
    """

    __slots__ = ("chunks", "high", "low", "number")

    def __init__(self, chunks: np.ndarray, place: object) -> None:
        self.chunks = chunks
        self.low, self.high = int(chunks.min()) * CHUNK, int(chunks.max()) * CHUNK + CHUNK
        self.number = _numbers.setdefault(place, len(_numbers))

    def span(self, cta: int, part: int | None = None) -> Span:
        return Span(cta, self.low, self.high, self.chunks, self.number, part)


@lru_cache(maxsize=4096)
def extent(shape: Shape) -> Extent:
    return Extent(operand_chunks(*shape), shape)


@lru_cache(maxsize=4096)
def quarters(shape: Shape) -> list[Extent]:
    """The extents of the four quarters of an operand's rows."""
    chunks = np.split(extent(shape).chunks, 4, axis=1 if shape[3] else 0)
    return [Extent(part, (*shape, which)) for which, part in enumerate(chunks)]


@lru_cache(maxsize=4096)
def _right_modes(shape: Shape) -> bytes:
    """The content of `Machine.box_swizzle` if all chunks were written with the swizzle they are
    read with.
    """
    return bytes([shape[0].bits + 1]) * extent(shape).chunks.size


ELEMENTS: dict[str, Any] = {
    "f16": lambda raw: raw.view(np.float16).astype(np.float32),
    "bf16": lambda raw: bf16_to_f32(raw.view(np.uint16)),
    "tf32": lambda raw: (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32),
    "e4m3": lambda raw: raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "e5m2": lambda raw: raw.view(ml_dtypes.float8_e5m2).astype(np.float32),
    "s8": lambda raw: raw.view(np.int8).astype(np.float32),
    "u8": lambda raw: raw.view(np.uint8).astype(np.float32),
    "e2m1": lambda raw: (
        _nibbles(raw.view(np.uint8)).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ),
    "padded e2m1": lambda raw: spread(raw, 4).view(ml_dtypes.float4_e2m1fn).astype(np.float32),
    "padded e2m3": lambda raw: spread(raw, 6).view(ml_dtypes.float6_e2m3fn).astype(np.float32),
    "padded e3m2": lambda raw: spread(raw, 6).view(ml_dtypes.float6_e3m2fn).astype(np.float32),
    # a byte each, in tensor memory: 00xxxx00 and 00xxxxxx
    "byte e2m1": lambda raw: (
        (raw.view(np.uint8) >> 2 & 15).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ),
    "byte e2m3": lambda raw: (
        (raw.view(np.uint8) & 63).view(ml_dtypes.float6_e2m3fn).astype(np.float32)
    ),
    "byte e3m2": lambda raw: (
        (raw.view(np.uint8) & 63).view(ml_dtypes.float6_e3m2fn).astype(np.float32)
    ),
}
# bytes per element; two e2m1 share one; e2m1 and padded elements are always K-major
ITEMSIZE = {
    "f16": 2, "bf16": 2, "tf32": 4, **dict.fromkeys(
        ("e4m3", "e5m2", "s8", "u8", "e2m1", "padded e2m1", "padded e2m3", "padded e3m2"), 1),
}  # fmt: skip


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """(..., n) bytes as (..., 2 n) halves, the lower first."""
    return np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1)


# 16 elements of 4 or 6 bits padded to 16 bytes: bits of an element; its shift in a byte of its own
PADDED = {"b4x16_p64": (4, 2), "b6x16_p32": (6, 0)}


def spread(raw: np.ndarray, bits: int) -> np.ndarray:
    """(..., 16 n) bytes, each 16 of which begin with 16 elements of ``bits`` bits, as one byte per
    element.
    """
    units = np.ascontiguousarray(raw).view(np.uint8).reshape(-1, 16)[:, : 2 * bits]
    each = np.unpackbits(units, axis=1, bitorder="little").reshape(-1, bits)
    out = np.packbits(each, axis=1, bitorder="little")  # bits above are zero
    return out.reshape(*raw.shape[:-1], -1)


def accumulate(old: np.ndarray | None, product: np.ndarray, kind: str, saturate: bool) -> Any:
    """``product`` (float32; exact for integers) + ``old``, in the type of D: float32 for f32 and
    f16, the latter rounded; int32 for s32, which wraps unless it saturates.
    """
    if kind == "s32":
        total = product.astype(np.int64) + (0 if old is None else old)
        if saturate:
            total = total.clip(-(1 << 31), (1 << 31) - 1)
        return total.astype(np.int32)
    total = product if old is None else old + product
    return total.astype(np.float16).astype(np.float32) if kind == "f16" else total


@dataclass(frozen=True)
class Form:
    """The interpretation of an operand in shared memory: (rows, k_bytes of K) of ``kind``."""

    what: str  # the operand's name in reports
    kind: str
    rows: int
    mn_major: bool = False
    k_bytes: int = 32


class SharedOperand:
    """A matrix in the shared memory of a CTA, at the place that a descriptor gives."""

    def __init__(
        self, m: Machine, cta: int, desc: Descriptor, form: Form, ins: Instruction
    ) -> None:
        self.m, self.cta, self.desc, self.form, self.ins = m, cta, desc, form, ins
        kind = form.kind
        if (desc.bits == ATOMS_OF_32) != (form.mn_major and kind == "tf32"):
            raise BadOperand.at(
                ins,
                f"{form.what} ({desc}): MN-major tf32 takes the 128-byte swizzle with atoms of 32 "
                "bytes, and nothing else does",
            )
        phase = desc.start >> 7 & ((1 << desc.bits) - 1)
        if phase and desc.bits != ATOMS_OF_32:
            m.findings.add(
                "descriptor",
                f"{form.what} ({desc}) starts {128 * phase} bytes behind a multiple of "
                f"{128 << desc.bits}, at which its swizzle repeats, and has no base offset: by the "
                "letter the pattern begins where the matrix does",
                ins,
                advisory=True,
                remedy=f"an operand at a multiple of {128 << desc.bits} bytes",
            )
        self.shape: Shape = desc, form.rows, form.k_bytes, form.mn_major, ITEMSIZE[kind]
        self.extent = extent(self.shape)
        self.chunks = self.extent.chunks
        self.right_modes = _right_modes(self.shape)
        if self.extent.high > m.smem_bytes:
            raise BadOperand.at(
                ins,
                f"{form.what} ({desc}) reaches shared 0x{self.extent.high:x}, "
                f"past the CTA's {m.smem_bytes} bytes",
            )

    def span(self) -> Span:
        return self.extent.span(self.cta)

    def quarter(self, which: int, part: int) -> Span:
        """A quarter of its rows, as read by the ``part``-th of four warps."""
        return quarters(self.shape)[which].span(self.cta, part)

    def values(self) -> np.ndarray:
        """The values as float32, (rows, K)."""
        raw = self.raw()
        values = ELEMENTS[self.form.kind](raw.reshape(raw.shape[0], -1))
        return values.T if self.form.mn_major else values

    def raw(self) -> np.ndarray:
        """The chunks, as pairs of 64-bit words, in the order of `operand_chunks`."""
        self._check_written()
        raw = self.m.smem_chunks[self.cta].take(self.chunks).view(np.uint64)
        return raw.reshape(*self.chunks.shape, 2)

    def _check_written(self) -> None:
        """Raise BadOperand if TMA wrote the data with another swizzle than the descriptor's."""
        modes = self.m.box_swizzle[self.cta].take(self.chunks)
        if modes.tobytes() == self.right_modes:
            return
        wrong = modes != self.desc.bits + 1
        if (modes < 0).any():
            first = 16 * int(self.chunks[modes < 0].min())
            self.m.findings.add(
                "uninitialised",
                f"{self.form.what} ({self.desc}) holds shared memory that nothing has written, "
                f"first at shared memory 0x{first:x}",
                self.ins,
            )
        wrong &= modes > 0
        if wrong.any():
            at = tuple(v[0] for v in np.nonzero(wrong))
            line = int(self.m.box_line[self.cta, self.chunks[at]])
            self.m.findings.add(
                "swizzle",
                f"{self.form.what} ({self.desc}) was written by the TMA load at PTX line {line} "
                f"with {SWIZZLES[int(modes[at]) - 1]} swizzle",
                self.ins,
                remedy="one layout for the tensor map's box and for the MMA's operand",
            )
