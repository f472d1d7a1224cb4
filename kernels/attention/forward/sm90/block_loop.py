"""BlockLoop: one warpgroup's loop over the blocks of keys of its 64 rows.

    S = Q K[n]^T, P = exponentials of S, O += P V[n]

from the last block to the first, or from the first to the last where the tile says so.

It releases blocks that only the rows of the other warpgroups see without computing.

A step issues QK of its block and, behind it, PV of the block before, whose P is in registers; the
softmax of this block runs while the tensor cores compute that PV. Meanwhile the other warpgroup
issues its two products: an OrderedBarrier makes them alternate, so that the tensor cores always
have one's products during the other's exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.wgmma import WgmmaProduct, round_to
from cutex.device.attention.block_info import Blocks, Path
from cutex.device.attention.guarded_softmax import GuardedSoftmax
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.softmax import rows_of
from cutex.device.pipeline import OrderedBarrier, PipelineState, Ring

State = tuple[PipelineState, PipelineState]  # states in the rings of K and of V


class Products(NamedTuple):
    """The products of a tile of 64 rows."""

    qk: WgmmaProduct  # into an accumulator of each step's own
    pv: WgmmaProduct  # of P in registers, into O
    half_qk: WgmmaProduct | None = None  # of the first half of a block's keys


class KeyRings(NamedTuple):
    """The rings of K and of V."""

    k: Ring
    v: Ring

    def consumer(self) -> State:
        return self.k.consumer(), self.v.consumer()


@dataclass(frozen=True)
class Turns:
    """The order in which the warpgroups of a CTA issue their products, one step each."""

    barrier: OrderedBarrier
    warpgroup: Int32  # this one
    warpgroups: int

    @cute.jit
    def start(self) -> None:
        """Give the first warpgroup its turn; the last one calls it."""
        if self.warpgroup == self.warpgroups - 1:
            self.barrier.signal(0)

    def wait(self) -> None:
        self.barrier.wait(self.warpgroup)

    def end(self) -> None:
        self.barrier.signal((self.warpgroup + 1) % self.warpgroups)


@dataclass(frozen=True)
class BlockLoop:
    products: Products
    rings: KeyRings
    score_ops: ScoreOps
    softmax: GuardedSoftmax
    factors: cute.Tensor  # (2)
    turns: Turns | None = None  # None: the only warpgroup
    optimistic: bool = False  # blocks without a mask may be added without their maximum

    @property
    def qk(self) -> WgmmaProduct:
        return self.products.qk

    @property
    def pv(self) -> WgmmaProduct:
        return self.products.pv

    @property
    def k(self) -> Ring:
        return self.rings.k

    @property
    def v(self) -> Ring:
        return self.rings.v

    @property
    def acc_o(self) -> cute.Tensor:
        """O, (MMA, 1, 1) fp32."""
        return self.pv.acc

    @property
    def tOrP(self) -> cute.Tensor:
        """P, ((2, 2, 2), 1, MMA_K), rounded."""
        return self.pv.a

    @cute.jit
    def run(
        self,
        blocks: Blocks,
        half: Int32 | None,
        state: State,
        safe: Boolean,
        forwards: Int32 | None,
    ) -> State:
        """Compute O over all blocks, of which there is at least one, without the last PV and
        unscaled; return the states after. `half` says whether these rows see only the first half of
        the first block (None: no), `forwards` is given only with a band."""
        band = self.score_ops.mask.band
        path, (before, clean, after) = blocks.path(forwards), blocks.runs(forwards)
        half_qk = self.products.half_qk
        if cutlass.const_expr(half_qk is None):
            state = self.first(path.start, state, self.qk)
        elif half:
            state = self.first(path.start, state, half_qk)
        else:
            state = self.first(path.start, state, self.qk)
        path = path.after(1)
        if cutlass.const_expr(band.hi is not None):
            state = self.steps(path, before, state, "masked")
            path = path.after(before)
        if cutlass.const_expr(self.optimistic):
            # NOTE: with a band, a row may see no key before the first block that it sees whole
            count = clean if safe else cutlass.min(clean, 1 if band.hi is not None else 0)
            state = self.steps(path, count, state, "clean")
            path = path.after(count)
            clean -= count
        state = self.steps(path, clean, state, "add" if self.optimistic else "clean")
        if cutlass.const_expr(band.lo is not None or forwards is not None):
            state = self.steps(path.after(clean), after, state, "masked")
        return state

    @cute.jit
    def first(self, n_block: Int32, state: State, qk: cutlass.Constexpr[WgmmaProduct]) -> State:
        """Run QK and softmax of the first block, which may contain the end of the keys, or of its
        first half."""
        k, v = state
        acc_s = qk.mma.accumulator()
        self.k.wait_full(k)
        qk.into(acc_s).issue(k.slot, accumulate=False)
        warpgroup.wait_group(0)
        self.k.release(k)
        k.advance()
        scores = rows_of(acc_s)
        self.score_ops.apply(scores, n_block, True)
        self.softmax.first(scores)
        if cutlass.const_expr(qk is not self.qk):
            self.tOrP.fill(0.0)  # of the other half
        round_to(self.tOrP, acc_s)
        self.acc_o.fill(0.0)
        return k, v

    @cute.jit
    def steps(self, path: Path, count: Int32, state: State, kind: cutlass.Constexpr[str]) -> State:
        """Run `count` steps along `path`."""
        k, v = state
        for i in cutlass.range(count, unroll=1):
            k, v = self.step(path.block(i), (k, v), kind)
        return k, v

    @cute.jit
    def step(self, n_block: Int32, state: State, kind: cutlass.Constexpr[str]) -> State:
        """Run QK and softmax of a block, and PV of the one before.

        kind: "masked"; "clean", without a mask; or "add", without a mask and without looking for a
        larger score.
        """
        k, v = state
        # NOTE: an accumulator that outlives its step would keep its registers in the next
        acc_s = self.qk.mma.accumulator()
        self.k.wait_full(k)
        self.await_turn()
        self.qk.into(acc_s).issue(k.slot, accumulate=False)
        self.v.wait_full(v)
        self.pv.issue(v.slot, accumulate=True)
        self.end_turn()
        warpgroup.wait_group(1)
        self.k.release(k)
        k.advance()
        scores = rows_of(acc_s)
        self.score_ops.apply(scores, n_block, kind == "masked")
        rescale = Boolean(False)
        if cutlass.const_expr(kind == "add"):
            self.softmax.add(scores)
        else:
            rescale = self.softmax.next(scores, self.factors)
        warpgroup.wait_group(0)
        self.v.release(v)
        v.advance()
        round_to(self.tOrP, acc_s)
        if cutlass.const_expr(kind != "add"):  # noqa: SIM102 - known when tracing, the next is not
            if rescale:
                self.scale_output()
        return k, v

    def await_turn(self) -> None:
        if self.turns is not None:
            self.turns.wait()

    def end_turn(self) -> None:
        if self.turns is not None:
            self.turns.end()

    @cute.jit
    def pass_over(self, count: Int32, state: State, in_turn: cutlass.Constexpr[bool]) -> State:
        """Release `count` blocks that these rows do not see, taking turns as steps do or, not
        `in_turn`, as the first block does."""
        k, v = state
        for _ in cutlass.range(count, unroll=1):
            if cutlass.const_expr(in_turn):
                self.await_turn()
                self.end_turn()
            # NOTE: an arrival before the slot is full could still count for its previous phase
            self.k.wait_full(k)
            self.k.release(k)
            k.advance()
            self.v.wait_full(v)
            self.v.release(v)
            v.advance()
        return k, v

    @cute.jit
    def last(self, state: State) -> State:
        """Run PV of the last block."""
        k, v = state
        self.v.wait_full(v)
        self.pv.issue(v.slot, accumulate=True)
        warpgroup.wait_group(0)
        self.v.release(v)
        v.advance()
        return k, v

    @cute.jit
    def scale_output(self) -> None:
        """Multiply each row of O by its factor."""
        rows = rows_of(self.acc_o)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] *= self.factors[r]
