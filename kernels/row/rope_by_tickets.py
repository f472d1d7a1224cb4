"""Rotary position embedding of dense tokens by bulk copies, whose CTAs that stay draw them.

A chunk is some tokens of one batch entry, with the rows of cos and sin that turn them. Those of the
same place in each entry are neighbours in order, so that cos and sin come from L2 for all but one.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.compile import Argument, Operand, Scalar
from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing, Run, lead_of
from cutex.device.row.tickets import Tickets
from cutex.device.row.tile import RowTile
from cutex.kernels.row.by_tickets import DRAWN, END, ByTickets
from cutex.kernels.row.kernel import launch_of_groups
from cutex.kernels.row.rope import halves, rotate

VECTOR_BITS = 128


@dataclass(frozen=True)
class RopeTicketsConfig:
    """A rotation of dense tokens whose heads, rotated parts, and rows of cos and sin are whole
    vectors.

    vectors: those of a head that are rotated, of pairs that are halves those of one half; elements,
    angles: of x, and of cos and of sin, for which a slot has room.
    """

    interleaved: bool
    table: str  # the dtype of cos and sin
    vectors: int
    elements: int
    angles: int
    in_place: bool = False
    threads: int = 256
    slots: int = 6
    resident: int = 2

    @property
    def tile(self) -> RowTile:
        return RowTile(1, self.threads, 1, 1, 1, False)


@dataclass(frozen=True)
class Rotation:
    """The tensors of a rotation, and which rows of cos and sin turn which tokens."""

    x: cute.Tensor  # (B, T, H, D)
    y: cute.Tensor  # (B, T, H, D)
    cos: cute.Tensor  # (S, R)
    sin: cute.Tensor  # (S, R)
    tokens: Int32  # of a chunk, but of the last ones of an entry
    offset: Int32
    sign: Float32

    def place(self, chunk: Int32) -> tuple[Int32, Int32, Int32]:
        """The entry, the first token and the tokens of a chunk."""
        batch = Int32(cute.size(self.x, mode=[0]))
        first = chunk // batch * self.tokens
        last = cutlass.min(first + self.tokens, Int32(cute.size(self.x, mode=[1])))
        return chunk % batch, first, last - first

    @property
    def chunks(self) -> Int32:
        """The number of chunks of all entries."""
        batch, tokens = (Int32(cute.size(self.x, mode=[i])) for i in range(2))
        return cute.ceil_div(tokens, self.tokens) * batch

    def of_tokens(self, mX: cute.Tensor, chunk: Int32, like: cute.Tensor) -> Run:
        """A chunk of mX (B, T, H, D), at the slot offset of `like`'s."""
        entry, first, count = self.place(chunk)
        tokens, heads, d = (Int32(cute.size(mX, mode=[i])) for i in range(1, 4))
        token = heads * d
        gX = cute.make_tensor(mX[entry, first, 0, None].iterator, cute.make_layout(count * token))
        lead = lead_of(like, (entry * tokens + first) * token)
        return Run(gX, lead, Boolean(True), Boolean(True), True)

    def of_table(self, mTable: cute.Tensor, chunk: Int32) -> Run:
        """The rows of mTable (S, R) that turn a chunk."""
        _, first, count = self.place(chunk)
        r, row = Int32(cute.size(mTable, mode=[1])), first + self.offset
        gT = cute.make_tensor(mTable[row, None].iterator, cute.make_layout(count * r))
        return Run(gT, lead_of(mTable, row * r), Boolean(True), Boolean(True), True)


@dataclass(frozen=True)
class RopeRings:
    """Slots for chunks of x, and beside each those for their rows of cos and sin."""

    x: BulkRing
    cos: BulkRing
    sin: BulkRing

    @staticmethod
    def allocate(x: cute.Tensor, table: cute.Tensor, config: RopeTicketsConfig) -> RopeRings:
        c = config
        rings = [BulkRing.allocate(x.element_type, c.elements, c.slots)]
        for _ in range(2):
            rings.append(BulkRing.allocate(table.element_type, c.angles, c.slots))
        publish_barriers(tuple(ring.full for ring in rings))
        return RopeRings(*rings)

    @property
    def full(self):
        return self.x.full

    def __getitem__(self, turn: Int32 | int) -> cute.Tensor:
        return self.x[turn]


class RopeByTickets(ByTickets):
    """y = x rotated, as by Rope. Thread 0 of a CTA draws chunks of tokens and starts their copies;
    all threads rotate a chunk in its slot, from where it is copied out.

    smem        bytes
    x           slots * (elements of x + 144)
    cos, sin    slots * (angles + 144) each
    """

    archs = ("sm_90a", "sm_100a", "sm_120a")
    dtypes = ("bf16", "fp16", "fp32")
    name = "row_rope_by_tickets"

    def __init__(self, config: RopeTicketsConfig) -> None:
        self.config, self.tile, self.stages = config, config.tile, config.slots

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c, heads = self.config, ("b", "t", "h", "d")
        made = [Operand(name, heads, dtype) for name in ("x", "y")[: 2 - c.in_place]]
        made += [Operand(name, ("s", "r"), c.table) for name in ("cos", "sin")]
        scalars = Scalar("offset", "int32"), Scalar("sign"), Scalar("tokens", "int32")
        return (*made, DRAWN, *scalars, Scalar("groups", "int32"))

    @cute.jit
    def __call__(self, mX: cute.Tensor, *rest) -> None:
        given = [mX, *rest] if self.config.in_place else rest
        mY, mCos, mSin, mDrawn, offset, sign, tokens, groups, stream = given
        rotation = Rotation(mX, mY, mCos, mSin, tokens, offset, sign)
        how = launch_of_groups(self.tile, self.config.resident, groups, stream)
        self.kernel(rotation, mDrawn, groups).launch(**how)

    @cute.kernel
    def kernel(self, rotation: Rotation, mDrawn: cute.Tensor, groups: Int32) -> None:
        places, rings = self.places(), RopeRings.allocate(rotation.x, rotation.cos, self.config)
        group = Int32(cute.arch.block_idx()[0])
        how = Int32(0), Int32(1), rotation.chunks, self.stages - 1
        tickets = Tickets(mDrawn.iterator, group, groups, *how)
        drawn = self.first_ones(rotation, rings, places, tickets)
        turn = Int32(0)
        rings.x.wait(turn)
        chunk = places[turn]
        while chunk != END:
            rings.cos.wait(turn)
            rings.sin.wait(turn)
            self.turn(rotation, rings, chunk, turn)
            drawn = self.leave((rotation, rotation), chunk, rings, places, tickets, drawn, turn)
            turn += 1
            rings.x.wait(turn)
            chunk = places[turn]
        self.end(tickets, drawn[0])

    def run(self, rotation: Rotation, chunk: Int32, like: Rotation | None = None) -> Run:
        """The chunk of y."""
        return rotation.of_tokens(rotation.y, chunk, rotation.x)

    def bring(self, rotation: Rotation, rings: RopeRings, chunk: Int32, turn: Int32 | int) -> None:
        """Start the copies of a chunk, and of what turns it, to the slots of a turn."""
        rings.x.load(rotation.of_tokens(rotation.x, chunk, rotation.x), turn)
        rings.cos.load(rotation.of_table(rotation.cos, chunk), turn)
        rings.sin.load(rotation.of_table(rotation.sin, chunk), turn)

    @cute.jit
    def turn(self, rotation: Rotation, rings: RopeRings, chunk: Int32, turn: Int32) -> None:
        """Rotate a chunk in its slot. A thread has one vector of some heads."""
        c, thread = self.config, Int32(cute.arch.thread_idx()[0])
        heads, d = (Int32(cute.size(rotation.x, mode=[i])) for i in (2, 3))
        r = Int32(cute.size(rotation.cos, mode=[1]))
        width = VECTOR_BITS // rotation.x.element_type.width
        pairs = width // (1 + c.interleaved)
        _, _, count = rotation.place(chunk)
        x_run = rotation.of_tokens(rotation.x, chunk, rotation.x)
        sX = cute.domain_offset((x_run.lead,), rings.x[turn])
        runs = [rotation.of_table(t, chunk) for t in (rotation.cos, rotation.sin)]
        slots = rings.cos[turn], rings.sin[turn]
        tables = [cute.domain_offset((run.lead,), s) for run, s in zip(runs, slots, strict=True)]
        lanes = cutlass.const_expr(c.threads // c.vectors)
        vector, lane = thread % c.vectors, thread // c.vectors
        if lane < lanes:
            for head in cutlass.range(lane, count * heads, lanes, unroll=2):
                at = head // heads * r + vector * pairs
                cos, sin = (loaded(t, at, pairs).load().to(Float32) for t in tables)
                first = head * d + vector * width
                places = [first + r * i for i in range(2 - c.interleaved)]
                rX = [loaded(sX, at, width) for at in places]
                rotate(halves(rX, c.interleaved), cos, rotation.sign * sin)
                for r_, at in zip(rX, places, strict=True):
                    cute.autovec_copy(r_, vector_of(sX, at, width))


def vector_of(sX: cute.Tensor, at: Int32, count: int) -> cute.Tensor:
    """`count` elements of a slot, a vector, from `at` on."""
    start, align = (sX.iterator + at).toint(), count * sX.element_type.width // 8
    p = cute.make_ptr(sX.element_type, start, sX.iterator.memspace, assumed_align=align)
    return cute.make_tensor(p, cute.make_layout(count))


def loaded(sX: cute.Tensor, at: Int32, count: int) -> cute.Tensor:
    """The same in registers."""
    rX = cute.make_rmem_tensor(count, sX.element_type)
    cute.autovec_copy(vector_of(sX, at, count), rX)
    return rX
