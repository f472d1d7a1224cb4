"""One tcgen05.mma as a kernel, with operands in shared memory and an accumulator in tensor memory,
and its result by definition. Every lane and column that it must not change is compared as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from operands import FORMATS, Layout, atom_rows, k_of, packed, size_of, small_integers
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

LANES = 128
IDLE = 0x3C5A0000  # the word of tensor memory before, to which lane and column are added
SMEM = 65536
B_AT = 32768
OUT = {"f32": (1, np.float32), "f16": (0, np.float16), "s32": (2, np.int32)}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5,
         "u8": 0, "s8": 1}  # fmt: skip
KINDS = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "u8": "i8", "s8": "i8",
         **dict.fromkeys(("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"), "f8f6f4")}  # fmt: skip


def kernel(mma: str, group: int, width: int) -> str:
    """The kernel of four warps per CTA: copy s to shared memory and t to ``width`` columns of
    tensor memory, run one MMA, and copy tensor memory back to t.
    """
    fence = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" * (group == 2)
    return f"""
        mov.u32 %r0, smem;
        add.u32 %r1, %r0, {SMEM};                    // an mbarrier; the address of tensor memory
        mov.u32 %r10, %tid.x;
        shr.u32 %r11, %r10, 5;
        setp.eq.u32 %p0, %r10, 0;
        setp.eq.u32 %p1, %r11, 0;
        @%p0 mbarrier.init.shared::cta.b64 [%r1], 1;
        @%p0 fence.mbarrier_init.release.cluster;
        shl.b32 %r2, %r10, 4;
        mad.wide.u32 %d1, %cta, {SMEM}, %s;
        FILLED:
        add.u32 %r3, %r0, %r2;
        cvt.u64.u32 %d0, %r2;
        add.u64 %d0, %d0, %d1;
        ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d0];
        st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}};
        add.u32 %r2, %r2, 2048;
        setp.lt.u32 %p2, %r2, {SMEM};
        @%p2 bra FILLED;
        fence.proxy.async.shared::cta;
        @%p1 tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r1+16], 512;
        @%p1 tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
        bar.sync 0;
        {fence}
        ld.shared.u32 %r12, [%r1+16];
        shl.b32 %r13, %r11, 21;
        add.u32 %r13, %r13, %r12;                    // this warp's lanes
        {
        _each_32_columns(
            width,
            "ld.global.v4.u32 {four}, [%t_i+{to}];",
            "tcgen05.st.sync.aligned.32x32b.x32.b32 [%r13+{at}], {regs};",
        )
    }
        tcgen05.wait::st.sync.aligned;
        tcgen05.fence::before_thread_sync;
        bar.sync 0;
        {fence}
        tcgen05.fence::after_thread_sync;
        mov.u32 %r14, %cluster_ctarank;
        setp.eq.and.u32 %p3, %r14, 0, %p0;
        {mma}
        WAITS:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
        @!%p2 bra WAITS;
        tcgen05.fence::after_thread_sync;
        {
        _each_32_columns(
            width,
            "tcgen05.ld.sync.aligned.32x32b.x32.b32 {regs}, [%r13+{at}];",
            "st.global.v4.u32 [%t_i+{to}], {four};",
        )
    }
        tcgen05.wait::ld.sync.aligned;
        bar.sync 0;
        {fence}
        @%p1 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r12, 512;
    """


_REGS = "{" + ", ".join(f"%r{64 + i}" for i in range(32)) + "}"
_FOURS = ["{" + ", ".join(f"%r{64 + 4 * i + j}" for j in range(4)) + "}" for i in range(8)]


def _each_32_columns(width: int, *texts: str) -> str:
    """The texts for every 32 columns; those that move four registers occur eight times."""
    out = []
    for at in range(0, width, 32):
        for text in texts:
            if "{four}" in text:
                out += [text.format(four=f, to=4 * at + 16 * i) for i, f in enumerate(_FOURS)]
            else:
                out.append(text.format(regs=_REGS, at=at))
    return "\n".join(out)


@dataclass
class Mma:
    """D (m, n) = A B^T + D, over one or more steps of K."""

    a: Layout | str  # a string: the kind of A in tensor memory
    b: Layout
    m: int
    n: int
    group: int = 1
    d: str = "f32"
    column: int = 16  # of D
    lane: int = 0
    a_column: int = 0  # of A in tensor memory; the address of an MMA, not of its first value
    accumulate: int = 1
    steps: int = 1
    negate: int = 0  # bit 0 A, bit 1 B
    saturate: bool = False
    off: tuple[int, ...] = ()  # words of disabled lanes
    scale: int = 0  # D * 2^-scale
    ws: str = ""  # of tcgen05.mma.ws: its collector, or " "
    seed: int = 0
    arch: str = "sm_100a"

    @property
    def a_kind(self) -> str:
        return self.a if isinstance(self.a, str) else self.a.kind

    @property
    def idesc(self) -> int:
        value = OUT[self.d][0] << 4 | CODES[self.a_kind] << 7 | CODES[self.b.kind] << 10
        value |= self.saturate << 3 | self.negate << 13 | self.b.mn_major << 16
        if not isinstance(self.a, str):
            value |= self.a.mn_major << 15
        return value | self.n >> 3 << 17 | self.m >> 4 << 24

    @property
    def width(self) -> int:
        """Columns of tensor memory that are set and compared: D, and some more."""
        return min(512, -(-(self.column + self.n + 16) // 32) * 32)

    def values(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        k = k_of(self.b.kind) * self.steps
        a = small_integers(self.a_kind, (self.m, k), self.seed)
        b = small_integers(self.b.kind, (self.n, k), self.seed + 1)
        c = np.random.default_rng(self.seed + 2).integers(-64, 64, (self.m, self.n))
        return a, b, c

    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """CTA of the pair, lane and column of each value of D (m, n), by data paths A, B, D and
        F."""
        m, n = np.arange(self.m)[:, None], np.arange(self.n)[None, :]
        zero = 0 * (m + n)
        if self.ws:
            share = self.n * self.m // LANES
            cta, lane, column = 0, m + self.m * (n // share), n % share
        elif self.group == 2 and self.m == 256:
            cta, lane, column = m // 128, m % 128, n
        elif self.group == 2:
            cta, lane = m // 64, m % 64 + 64 * (n // (self.n // 2))
            column = n % (self.n // 2)
        elif self.m == 128:
            cta, lane, column = 0, m, n
        else:
            cta, lane, column = 0, m % 16 + 32 * (m // 16) + self.lane, n
        return cta + zero, lane + zero, column + zero + self.column

    def text(self) -> str:
        target = f"mov.u32 %r20, {self.lane << 16 | self.column}; add.u32 %r20, %r20, %r12;"
        b = f"""
            add.u32 %r21, %r0, {self.b.start};
            bfe.u32 %r21, %r21, 4, 14;
            cvt.u64.u32 %d3, %r21;
            or.b64 %d3, %d3, {self.b.descriptor("sm_100a")};
        """
        if isinstance(self.a, str):
            a, a_is = f"add.u32 %r22, %r12, {self.a_column + (self.lane << 16)};", "[%r22]"
        else:
            a = f"""
                add.u32 %r21, %r0, {self.a.start};
                bfe.u32 %r21, %r21, 4, 14;
                cvt.u64.u32 %d2, %r21;
                or.b64 %d2, %d2, {self.a.descriptor("sm_100a")};
            """
            a_is = "%d2"
        off = ""
        if self.off:
            registers = [f"%r{40 + i}" for i in range(len(self.off))]
            off = "{" + ", ".join(registers) + "}, "
            a += "".join(f"mov.u32 {r}, {w};" for r, w in zip(registers, self.off, strict=True))
        scale = f", {self.scale}" if self.scale else ""
        ws = ".ws" * bool(self.ws)
        op = f"tcgen05.mma{ws}.cta_group::{self.group}.kind::{KINDS[self.b.kind]}{self.ws.strip()}"
        lines = [target, a, b, f"mov.u32 %r23, {self.idesc};",
                 f"setp.eq.u32 %p4, {self.accumulate}, 1;"]  # fmt: skip
        for step in range(self.steps):
            if step:
                lines.append("add.u64 %d3, %d3, 2; setp.eq.u32 %p4, %r0, %r0;")
                lines.append(
                    "add.u32 %r22, %r22, 8;" if isinstance(self.a, str) else "add.u64 %d2, %d2, 2;"
                )
            lines.append(f"@%p3 {op} [%r20], {a_is}, %d3, %r23, {off}%p4{scale};")
        commit = f"@%p3 tcgen05.commit.cta_group::{self.group}.mbarrier::arrive::one"
        if self.group == 2:
            lines.append(f"mov.u16 %h0, 3; {commit}.shared::cluster.multicast::cluster.b64 [%r1],"
                         " %h0;")  # fmt: skip
        else:
            lines.append(f"{commit}.shared::cluster.b64 [%r1];")
        return "\n".join(lines)

    def shared(self) -> np.ndarray:
        """Images of shared memory (ctas, SMEM): each CTA of a pair holds its half of A and B."""
        a, b, _ = self.values()
        images = np.zeros((self.group, SMEM), np.uint8)
        for cta in range(self.group):
            rows = slice(cta * self.n // self.group, (cta + 1) * self.n // self.group)
            self.b.put(images[cta], b[rows])
            if not isinstance(self.a, str):
                rows = slice(cta * self.m // self.group, (cta + 1) * self.m // self.group)
                self.a.put(images[cta], a[rows])
        return images

    def tensor_memory(self) -> np.ndarray:
        """The words before the MMA, (ctas, lanes, columns)."""
        lane, column = np.arange(LANES)[:, None], np.arange(self.width)[None, :]
        t = np.broadcast_to(IDLE + lane * 512 + column, (self.group, LANES, self.width)).copy()
        t = t.astype(np.uint32)
        a, _, c = self.values()
        t[self.places()] = self.encoded(c)
        if isinstance(self.a, str):
            raw = np.ascontiguousarray(a.astype(FORMATS[self.a])).view(np.uint8)
            raw = (raw << 2 if self.a == "e2m1" else raw).view(np.uint32)  # (m, words)
            at = slice(self.a_column, self.a_column + raw.shape[1])
            half = self.m // self.group
            rows = np.arange(half)
            for cta in range(self.group):
                mine = raw[cta * half :][:half]
                if half == 128 or self.ws:
                    t[cta, :, at] = np.tile(mine, (LANES // half, 1))
                elif self.group == 2:  # twice, for the two halves of N
                    t[cta, :64, at] = t[cta, 64:, at] = mine
                else:
                    t[cta, rows % 16 + 32 * (rows // 16) + self.lane, at] = mine
        return t

    def encoded(self, values: np.ndarray) -> np.ndarray:
        out = np.asarray(values).astype(OUT[self.d][1])
        return out.view(np.uint16).astype(np.uint32) if self.d == "f16" else out.view(np.uint32)

    def want(self) -> np.ndarray:
        a, b, c = self.values()
        sign = -1 if self.negate in (1, 2) else 1
        return sign * (a @ b.T) + (c * 0.5**self.scale if self.accumulate else 0)

    def run(self, t: np.ndarray | None = None, **how) -> np.ndarray:
        """Run the MMA, and return tensor memory afterwards."""
        t = aligned(self.tensor_memory() if t is None else t)
        arrays = {"s": aligned(self.shared()), "t": t.reshape(-1, self.width)}
        shape = Shape(grid=self.group, block=128, cluster=self.group, smem=SMEM + 64)
        simulate_ptx(
            kernel(self.text(), self.group, self.width), arrays, shape, arch=self.arch, **how
        )
        return t

    def check(self, **how) -> None:
        before = self.tensor_memory()
        got = self.run(**how)
        cta, lane, column = self.places()
        words = self.encoded(self.want())
        written = np.ones_like(words, bool)
        if self.off:
            off = np.array(self.off, np.uint32).reshape(self.group, 4)
            written = (off[cta, lane // 32] >> (lane % 32).astype(np.uint32) & 1) == 0
        want = before.copy()
        want[cta[written], lane[written], column[written]] = words[written]
        if self.d == "f16":  # the upper halves are not used
            got[cta, lane, column] &= 0xFFFF
            want[cta, lane, column] &= 0xFFFF
        np.testing.assert_array_equal(got, want)


def operand(kind: str, swizzle: int = 128, mn_major: bool = False, rows: int = 128, start: int = 0):
    """An operand with gaps between its atoms, which the descriptor's strides skip."""
    gap = (1024 if swizzle == 128 else 512) if rows * size_of(kind) <= 256 else 0
    k_atoms = 32 // size_of(kind) // atom_rows(swizzle)
    return packed(kind, swizzle, mn_major, start, rows, gap, k_atoms)
