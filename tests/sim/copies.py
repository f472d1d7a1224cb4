"""Kernels around one bulk or tensor copy, and a definition of the copy, element by element."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
from ptx_kernel import Shape
from tensor_maps import aligned, encode, size_of, swizzled

FILL = 0xEE  # the bytes of shared memory before a copy
BYTES = 16384  # of shared memory that is filled and looked at
LOAD = "shared::cluster.global.tile.mbarrier::complete_tx::bytes"


@dataclass
class Tensor:
    """A tensor in global memory; all tuples have the innermost mode first; ``pad`` is in bytes per
    dimension.
    """

    kind: str
    dims: tuple[int, ...]
    pad: int = 0
    seed: int = 0
    data: np.ndarray = field(init=False)  # bytes
    strides: tuple[int, ...] = field(init=False)  # bytes, of the outer dimensions

    def __post_init__(self) -> None:
        strides, n = [], self.dims[0] * size_of(self.kind)
        for d in self.dims[1:]:
            strides.append(-(-n // 16) * 16 + self.pad)
            n = strides[-1] * d
        self.strides = tuple(strides)
        raw = np.random.default_rng(self.seed).integers(0, 256, -(-n // 16) * 16, np.uint8)
        self.data = aligned(raw)

    def byte_at(self, position: tuple[int, ...]) -> int | None:
        """The byte offset of the element at ``position``; None outside."""
        if not all(0 <= x < d for x, d in zip(position, self.dims, strict=True)):
            return None
        strides = (size_of(self.kind), *self.strides)
        return sum(x * s for x, s in zip(position, strides, strict=True))


def _tf32(bits: int) -> bytes:
    """Round to the nearest with 10 bits of mantissa; infinities and NaNs are truncated."""
    if bits >> 23 & 0xFF != 0xFF:
        bits += 0x1000
    return (bits & 0xFFFFE000).to_bytes(4, "little")


@dataclass
class Copy:
    """One box of a tensor: its map, its coordinates, and its address in shared memory."""

    tensor: Tensor
    box: tuple[int, ...]
    at: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: int = 0
    offset: int = 0
    nan: bool = False
    tf32: bool = False

    @property
    def map(self) -> np.ndarray:
        """The tensor map without the address, which the kernel puts in."""
        t = self.tensor
        raw = encode(0, t.kind, t.dims, t.strides, self.box, self.steps or None,
                     swizzle=self.swizzle, nan=self.nan, tf32=self.tf32)  # fmt: skip
        return aligned(np.frombuffer(raw, np.uint8))

    @property
    def coordinates(self) -> str:
        return "{" + ", ".join(map(str, self.at)) + "}"

    def elements(self) -> list[tuple[np.ndarray, int | None]]:
        """For each element of the box, the offsets of its bytes in shared memory and in the tensor
        (None outside).
        """
        size = size_of(self.tensor.kind)
        steps = (1, *self.steps[1:]) if self.steps else (1,) * len(self.box)
        counts = [-(-b // s) for b, s in zip(self.box, steps, strict=True)]
        out = []
        for k, place in enumerate(product(*(range(n) for n in reversed(counts)))):
            position = tuple(a + p * s for a, p, s in
                             zip(self.at, reversed(place), steps, strict=True))  # fmt: skip
            bytes_ = self.offset + k * size + np.arange(size)
            out.append((swizzled(bytes_, self.swizzle), self.tensor.byte_at(position)))
        return out

    @property
    def bytes(self) -> int:
        return len(self.elements()) * size_of(self.tensor.kind)

    def loaded(self) -> np.ndarray:
        """Shared memory after a load."""
        size = size_of(self.tensor.kind)
        smem = np.full(BYTES, FILL, np.uint8)
        outside = {2: b"\xf7\x7f", 4: b"\xf7\x7f\xf7\x7f"}[size] if self.nan else bytes(size)
        for where, byte in self.elements():
            value = np.frombuffer(outside, np.uint8)
            if byte is not None:
                value = self.tensor.data[byte : byte + size]
            if self.tf32:
                value = np.frombuffer(_tf32(int(value.view(np.uint32)[0])), np.uint8)
            smem[where] = value
        return smem

    def stored(self, smem: np.ndarray, combine=None) -> np.ndarray:
        """The tensor after a store of shared memory."""
        size = size_of(self.tensor.kind)
        data = self.tensor.data.copy()
        for where, byte in self.elements():
            if byte is not None:
                new = smem[where]
                if combine:
                    new = combine(data[byte : byte + size].copy(), new)
                data[byte : byte + size] = new
        return data


SETUP = f"""
mov.u32 %r0, smem;
add.u32 %r1, %r0, {BYTES};                      // an mbarrier, and another
setp.eq.u32 %p0, %lane, 0;
@%p0 st.global.u64 [%map], %x;
@%p0 fence.proxy.tensormap::generic.release.gpu;
@%p0 fence.proxy.tensormap::generic.acquire.gpu [%map], 128;
@%p0 mbarrier.init.shared::cta.b64 [%r1], 1;
@%p0 mbarrier.init.shared::cta.b64 [%r1+8], 1;
@%p0 fence.mbarrier_init.release.cluster;
shl.b32 %r2, %lane, 4;                          // shared memory, 512 bytes at a time, from s
mad.wide.u32 %d1, %cta, {BYTES}, %s;
FILLED:
add.u32 %r3, %r0, %r2;
cvt.u64.u32 %d0, %r2;
add.u64 %d0, %d0, %d1;
ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d0];
st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}};
add.u32 %r2, %r2, 512;
setp.lt.u32 %p1, %r2, {BYTES};
@%p1 bra FILLED;
fence.proxy.async.shared::cta;
bar.sync 0;
"""
WAIT = """
WAITS:
mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;
@!%p1 bra WAITS;
"""
DUMP = f"""
shl.b32 %r2, %lane, 4;                          // shared memory back to s
DUMPED:
add.u32 %r3, %r0, %r2;
cvt.u64.u32 %d0, %r2;
add.u64 %d0, %d0, %d1;
ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r3];
st.global.v4.u32 [%d0], {{%r4, %r5, %r6, %r7}};
add.u32 %r2, %r2, 512;
setp.lt.u32 %p1, %r2, {BYTES};
@%p1 bra DUMPED;
"""
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
DONE = "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"


def run(execute, copy: Copy, body: str, smem: np.ndarray | None = None, ctas: int = 1, **how):
    """Run the body after SETUP by one warp per CTA of a cluster, and return `s`, (ctas, BYTES), at
    the end.
    """
    s = aligned(np.full((ctas, BYTES), FILL, np.uint8) if smem is None else smem)
    arrays = {"map": copy.map, "x": copy.tensor.data, "s": s}
    shape = Shape(grid=ctas, block=32, cluster=ctas, smem=BYTES + 64)
    execute(SETUP + body, arrays, shape, **how)
    return s.reshape(ctas, BYTES)


def load_text(copy: Copy, more: str = "") -> str:
    return f"""
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {copy.bytes};
        @%p0 cp.async.bulk.tensor.{len(copy.at)}d.{LOAD}
            [%r0+{copy.offset}], [%map, {copy.coordinates}], [%r1]{more};
    """


def store_text(copy: Copy) -> str:
    return (
        f"@%p0 cp.async.bulk.tensor.{len(copy.at)}d.global.shared::cta.tile.bulk_group "
        f"[%map, {copy.coordinates}], [%r0+{copy.offset}];"
    )


def check_load(execute, copy: Copy) -> None:
    got = run(execute, copy, load_text(copy) + WAIT + DUMP)[0]
    np.testing.assert_array_equal(got, copy.loaded())


def check_store(execute, copy: Copy) -> None:
    smem = np.random.default_rng(5).integers(0, 256, (1, BYTES), np.uint8)
    want = copy.stored(smem[0])
    run(execute, copy, store_text(copy) + DONE, smem)
    np.testing.assert_array_equal(copy.tensor.data, want)
