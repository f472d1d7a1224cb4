"""BlockLoop: one warpgroup's loop over the blocks of keys of its 64 rows.

    S = Q K[n]^T, P = exponentials of S, O += P V[n]

from the last block to the first, or from the first to the last where the tile says so; with `turn`
the first block comes early: scores that rise, or fall, along the keys then exceed none of those of
both ends, and a sink is seen before the keys that it outweighs.

It releases blocks that only the rows of the other warpgroups see without computing.

A step issues QK of its block and, behind it, PV of the block before, whose P is in registers; the
softmax of this block runs while the tensor cores compute that PV. Meanwhile the other warpgroup
issues its two products: an OrderedBarrier makes them alternate, so that the tensor cores always
have one's products during the other's exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float16, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.scalar import bf16_twice, product_of_bf16
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, WgmmaProduct, pin, round_to
from cutex.device.attention.block_info import Blocks, Path
from cutex.device.attention.issue_order import IssueOrder
from cutex.device.attention.key_rings import KeyRings, Products, State
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.softmax import rows_of
from cutex.device.pipeline import Ring, threads_where

LOOK_BARRIER = 8  # the first of one named barrier for each warpgroup
PEAKED_THREADS = 28  # of a warpgroup's, more of which say that scores are peaked
EAGER = 8  # guarded blocks, of one in so many of which the largest probabilities are exact
CHUNK = 768  # keys, after which sums are looked at: scores may rise by 2^115 in so many


@dataclass(frozen=True)
class BlockLoop:
    """One warpgroup's loop over the blocks of keys of its 64 rows, and what it works with."""

    products: Products
    rings: KeyRings
    score_ops: ScoreOps
    softmax: Any  # a GuardedSoftmax; a WatchedSoftmax if it speculates
    factors: cute.Tensor  # (2)
    issue_order: IssueOrder | None = None  # None: the only warpgroup
    speculates: bool = False  # blocks without a mask may be added without their maximum
    rows: Int32 | int = ROWS  # of them, that are of the sequence
    asks_later: bool = False  # whether fp16's blocks by "add" ask behind the waits of the next step
    pending: Any = None  # (1) whether O is to be scaled behind QK of the next block; None: at once
    turns: bool = False  # block 0 comes early; its scores may exceed those before by any amount

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
        searched: Int32,
        forwards: Int32 | None,
        turn: Int32 | None = None,
    ) -> State:
        """Compute O over all blocks, of which there is at least one, without the last PV and
        without the final scaling; return the states.

        half: whether these rows see only the first half of the first block (None: no). searched: in
        at least how many unmasked blocks a larger score is looked for. forwards: given only with a
        band. turn: how many blocks precede block 0 (Path); None: all."""
        band = self.score_ops.mask.band
        path, (before, clean, after) = blocks.path(forwards, turn), blocks.runs(forwards)
        half_qk = self.products.half_qk
        if cutlass.const_expr(half_qk is None):
            state = self.first(path.first, state, self.qk)
        elif half:
            state = self.first(path.first, state, half_qk)
        else:
            state = self.first(path.first, state, self.qk)
        path = path.after(1)
        if cutlass.const_expr(self.speculates):
            searched = cutlass.min(clean, searched)
            before = before + searched if band.hi is not None else searched
            clean -= searched
        if cutlass.const_expr(band.hi is not None or self.speculates):
            state = self.steps(path, before, state, "masked")
            path = path.after(before)
        if cutlass.const_expr(self.looks_at_one):
            looked = self.early(path, clean)
            state = self.steps(path, looked, state, "looked")
            path, clean = path.after(looked), clean - looked
        if cutlass.const_expr(self.speculates):
            state = self.unsearched(path, clean, state)
        else:
            state = self.steps(path, clean, state, "clean")
        if cutlass.const_expr(band.lo is not None or forwards is not None):
            state = self.steps(path.after(clean), after, state, "late")
        return state

    @cute.jit
    def first(self, n_block: Int32, state: State, qk: cutlass.Constexpr[WgmmaProduct]) -> State:
        """Run QK and softmax of the first block, which may contain the end of the keys, or the end
        of their first half."""
        k, v = state
        acc_s = qk.mma.accumulator()
        self.k.wait_full(k)
        qk.into(acc_s).issue(k.slot, accumulate=False)
        warpgroup.wait_group(0)
        self.k.release(k)
        k.advance()
        scores = rows_of(acc_s)
        self.score_ops.apply(scores, n_block, True)
        if cutlass.const_expr(self.speculates):
            self.softmax.first(scores, self.seen_by_mask(scores, n_block))
        else:
            self.softmax.first(scores)
        if cutlass.const_expr(qk is not self.qk):
            self.tOrP.fill(0.0)  # of the other half
        round_to(self.tOrP, acc_s)
        self.acc_o.fill(0.0)
        return k, v

    @cute.jit
    def unsearched(self, path: Path, count: Int32, state: State) -> State:
        """Run `count` steps without a mask and without searching for larger scores: by "guard" if
        the last block showed that these rows' scores are peaked, or if it was not examined;
        otherwise by "add"."""
        if cutlass.const_expr(self.softmax.peaked is None):
            state = self.guarded(path, count, state)
        else:
            peaked = self.threads_where(self.softmax.is_guarded())
            if (peaked > self.most_tame()) | (count == 0):
                state = self.guarded(path, count, state)
            else:
                if cutlass.const_expr(self.turns and not self.looks_at_one):
                    looked = self.early(path, count)
                    state = self.steps(path, looked, state, "looked")
                    path, count = path.after(looked), count - looked
                self.softmax.forget_top()
                if cutlass.const_expr(self.is_fp16):
                    if cutlass.const_expr(self.asks_later):
                        state = self.following(path, count, state)
                    else:
                        state = self.steps(path, count, state, "add")
                else:
                    rises = cute.arch.vote_any_sync(self.softmax.is_low())
                    state = self.chunks(path, count, state, rises)
        return state

    def early(self, path: Path, count: Int32) -> Int32:
        """How many of `count` blocks without a mask are searched before references are left as they
        are: one, or all up to block 0, which may come behind some that other rows mask."""
        if not self.turns:
            return cutlass.min(count, 1)
        assert path.turn is not None
        return cutlass.min(count, cutlass.max(path.turn + 1, 1))

    @cute.jit
    def guarded(self, path: Path, count: Int32, state: State) -> State:
        """Run `count` steps by "guard", or by "guard low" where references are far below 0; in bf16
        those are left to "add"."""
        low = Int32(0)
        if cutlass.const_expr(self.looks_at_one):  # noqa: SIM102 - known when tracing
            if count > 0:
                self.softmax.note_looked()
        if cutlass.const_expr(self.is_fp16 or self.softmax.peaked is None):
            low = self.threads_where(self.softmax.is_low())
        if low > 0:
            if cutlass.const_expr(self.is_fp16 or self.softmax.peaked is None):
                state = self.steps(path, count, state, "guard low")
                self.softmax.note_top(low=True)
        else:
            eager = self.eager(count)
            if cutlass.const_expr(self.turns):
                eager = Int32(0) if cute.arch.vote_any_sync(self.softmax.is_negative()) else eager
            state = self.steps(path, count, state, "guard", eager)
            self.softmax.note_top()
        return state

    @cute.jit
    def eager(self, count: Int32) -> Int32:
        """In how many of `count` guarded blocks the largest probabilities are exact: an eighth of
        many, one of few, and none of few if rows are causal, where a large share of the blocks
        would raise references."""
        eager = Int32(1) if count < 2 * EAGER else (count + EAGER - 1) // EAGER
        causal = self.score_ops.mask.band.hi is not None
        if cutlass.const_expr(causal and self.softmax.peaked is not None):
            eager = eager if count >= EAGER else Int32(0)
        return eager

    def threads_where(self, condition: Boolean) -> Int32:
        """The number of this warp's threads for which `condition` holds; uniform over the warp."""
        barrier = LOOK_BARRIER
        if self.issue_order is not None:
            barrier = LOOK_BARRIER + self.issue_order.warpgroup
        return cute.arch.make_warp_uniform(threads_where(condition, barrier, WARPGROUP))

    @cute.jit
    def chunks(self, path: Path, count: Int32, state: State, rises: Boolean | bool) -> State:
        """Run `count` steps by "add". After every CHUNK keys, or four times as many, references
        rise where sums have grown and, where scores of this warp's rows may rise, before the last
        block, too.

        NOTE: a branch within a step would make ptxas round P after it, not among the exponentials.
        """
        k, v = state
        keys = 4 * CHUNK if self.turns else CHUNK  # scores rise less beyond those of both ends
        chunk, done = keys // self.score_ops.mask.tile_n, Int32(0)
        apart = Int32(0)  # blocks behind all chunks
        if cutlass.const_expr(rises is not False):
            apart = Int32(rises)
        while done < count:
            rest = cutlass.max(count - done - apart, 1)
            # NOTE: not known to be uniform, it would be computed again in each step
            number = cute.arch.make_warp_uniform(cutlass.min(rest, chunk))
            k, v = self.steps(path.after(done), number, (k, v), "add")
            done += number
            if done < count:
                self.lower((apart > 0) & (done + 1 == count), done == number, number)
        return k, v

    @cute.jit
    def lower(self, last: Boolean, first: Boolean, blocks: Int32) -> None:
        """Raise references where sums have grown, with P of the last block in registers."""
        if self.softmax.has_grown(last):
            self.softmax.lower(self.factors, last, first, blocks)
            self.scale_output()
            self.scale_p()

    @cute.jit
    def steps(
        self,
        path: Path,
        count: Int32,
        state: State,
        kind: cutlass.Constexpr[str],
        eager: Int32 | int = 0,
    ) -> State:
        """Run `count` steps along `path`, the first ones `eager`."""
        k, v = state
        for i in cutlass.range(count, unroll=1):
            k, v = self.step(path.block(i), (k, v), kind, i < eager, i, i + 1 == count)
        return k, v

    @cute.jit
    def step(
        self,
        n_block: Int32,
        state: State,
        kind: cutlass.Constexpr[str],
        eager: Boolean | bool = False,
        number: Int32 | int = -1,
        last: Boolean | bool = False,
    ) -> State:
        """Run QK and softmax of a block, and PV of the block before.

        kind: "masked"; "late", masked after blocks of other kinds; "clean", without a mask; "add",
        without a mask or a search for larger scores; "guard", "add" after raising references that
        the block exceeds by far; "guard low", the same for rows with references far below 0;
        "looked", the same for any rows, and it tests whether scores are peaked. An `eager` "guard"
        raises references to any larger score. `number` counts these blocks, and `last` marks the
        last of them.
        """
        k, v = state
        # NOTE: an accumulator that outlives its step would keep its registers in the next
        acc_s = self.qk.mma.accumulator()
        self.k.wait_full(k)
        self.await_issue()
        self.qk.into(acc_s).issue(k.slot, accumulate=False)
        if cutlass.const_expr(kind in ("guard", "guard low", "late")):
            self.scale_pending()
        self.v.wait_full(v)
        self.pv.issue(v.slot, accumulate=True)
        self.end_issue()
        softmax, rescale = self.softmax, Boolean(False)
        warpgroup.wait_group(1)
        self.k.release(k)
        k.advance()
        scores = rows_of(acc_s)
        self.score_ops.apply(scores, n_block, kind in ("masked", "late"))
        if cutlass.const_expr(kind == "add" and self.is_fp16):
            rescale = cute.arch.vote_any_sync(softmax.add_within(scores))
        elif cutlass.const_expr(kind == "add"):
            softmax.add(scores)
        elif cutlass.const_expr(kind == "guard"):
            ends = last if not self.is_fp16 and softmax.peaked is None else False
            rescale = softmax.guard(scores, self.factors, eager=eager, step=number, last=ends)
        elif cutlass.const_expr(kind == "guard low"):
            rescale = softmax.guard(scores, self.factors, low=True, step=number, last=last)
        elif cutlass.const_expr(kind == "looked"):
            seen = self.seen(n_block, cute.size(scores, mode=[1]))
            rescale = softmax.guard(scores, self.factors, seen)
        elif cutlass.const_expr(self.speculates):
            looked = None if kind == "late" else self.seen_by_mask(scores, n_block)
            rescale = softmax.next(scores, self.factors, looked, kind == "late")
        else:
            rescale = softmax.next(scores, self.factors)
        warpgroup.wait_group(0)
        self.v.release(v)
        v.advance()
        round_to(self.tOrP, acc_s)
        if cutlass.const_expr(kind == "add" and self.is_fp16):
            pin(self.tOrP)
            self.follow(acc_s, rescale)
        elif cutlass.const_expr(kind != "add"):
            if cutlass.const_expr(self.speculates):
                # NOTE: behind the branch, P is rounded behind all exponentials, not among them
                pin(self.tOrP)
            later = self.pending is not None and kind in ("guard", "guard low")
            if cutlass.const_expr(later):
                self.pending[0] = Int32(rescale)
            elif rescale:
                self.scale_output()
        return k, v

    @cute.jit
    def following(self, path: Path, count: Int32, state: State) -> State:
        """Run `count` steps by "add" in fp16, where each asks whether probabilities of the one
        before may be too large to be rounded: behind its waits for K and for the other warpgroups,
        where the vote takes no time."""
        k, v = state
        acc_s, exceeds = self.qk.mma.accumulator(), Boolean(False)  # of the step before
        acc_s.fill(0.0)  # NOTE: undefined, it would be kept in registers around the loop
        for i in cutlass.range(count, unroll=1):
            self.k.wait_full(k)
            self.await_issue()
            self.follow(acc_s, cute.arch.vote_any_sync(exceeds))
            self.qk.into(acc_s).issue(k.slot, accumulate=False)
            self.v.wait_full(v)
            self.pv.issue(v.slot, accumulate=True)
            self.end_issue()
            warpgroup.wait_group(1)
            self.k.release(k)
            k.advance()
            scores = rows_of(acc_s)
            self.score_ops.apply(scores, path.block(i), False)
            exceeds = self.softmax.add_within(scores)
            warpgroup.wait_group(0)
            self.v.release(v)
            v.advance()
            round_to(self.tOrP, acc_s)
            pin(self.tOrP)
        self.follow(acc_s, cute.arch.vote_any_sync(exceeds))
        return k, v

    @cute.jit
    def follow(self, acc_s: cute.Tensor, exceeds: Boolean) -> None:
        """If references of this warp have to follow the scores of a block by "add", whose
        probabilities are in acc_s, raise them and scale these, O and the sums; round P again."""
        if exceeds:
            self.softmax.lower(self.factors, False, True, Int32(1))
            self.scale(rows_of(acc_s))
            self.scale_output()
            round_to(self.tOrP, acc_s)

    @cute.jit
    def scale_pending(self) -> None:
        """Scale O if the block before raised references and O has not been scaled since."""
        if cutlass.const_expr(self.pending is not None):
            if self.pending[0] != 0:
                self.scale_output()
            self.pending[0] = Int32(0)

    @property
    def is_fp16(self) -> bool:
        """Whether probabilities may rise by only 2^16 before their tile must be computed again:
        then an unmasked block is examined, too, since rows may see little of the masked ones."""
        return self.tOrP.element_type is Float16

    @property
    def looks_at_one(self) -> bool:
        """Whether a whole block is examined before it is known whether scores are peaked."""
        return self.speculates and self.is_fp16 and self.score_ops.mask.band.hi is not None

    def seen_by_mask(self, scores: cute.Tensor, n_block: Int32) -> tuple[Int32, ...] | None:
        """`seen` for a block that may be masked; None if another block is examined in its place."""
        return None if self.looks_at_one else self.seen(n_block, cute.size(scores, mode=[1]))

    @cute.jit
    def seen(self, n_block: Int32, columns: cutlass.Constexpr[int]) -> tuple[Int32, ...]:
        """How many of this thread's `columns` of a block each of its rows sees; in fp16 -1 for rows
        past the sequence's end."""
        mask = self.score_ops.mask
        seen = [mask.seen(r, n_block, columns) for r in range(2)]
        if cutlass.const_expr(self.is_fp16):
            for r in cutlass.range_constexpr(2):
                seen[r] = seen[r] if mask.queries[r] < mask.seqlen_q else Int32(-1)
        return tuple(seen)

    def most_tame(self) -> Int32 | int:
        """The number of threads that may vote "peaked" before all rows are guarded: in fp16 in
        proportion to the rows inside the sequence."""
        return PEAKED_THREADS * self.rows // ROWS if self.is_fp16 else PEAKED_THREADS

    def await_issue(self) -> None:
        """Wait until it is this warpgroup's turn to issue."""
        if self.issue_order is not None:
            self.issue_order.wait()

    def end_issue(self) -> None:
        """Let the next warpgroup issue."""
        if self.issue_order is not None:
            self.issue_order.end()

    @cute.jit
    def pass_over(self, count: Int32, state: State, in_turn: cutlass.Constexpr[bool]) -> State:
        """Release `count` blocks that these rows do not see, alternating with the other warpgroup
        as steps do or, if not `in_turn`, as the first block does."""
        k, v = state
        for _ in cutlass.range(count, unroll=1):
            if cutlass.const_expr(in_turn):
                self.await_issue()
                self.end_issue()
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
        self.issue_last(state)
        return self.await_last(state)

    @cute.jit
    def issue_last(self, state: State) -> None:
        """Issue PV of the last block."""
        _, v = state
        self.scale_pending()
        self.v.wait_full(v)
        self.pv.issue(v.slot, accumulate=True)

    @cute.jit
    def await_last(self, state: State) -> State:
        """Wait for that product; O is then complete, but unscaled."""
        k, v = state
        warpgroup.wait_group(0)
        self.v.release(v)
        v.advance()
        return k, v

    @cute.jit
    def scale_output(self) -> None:
        """Multiply each row of O by its factor."""
        self.scale(rows_of(self.acc_o))

    @cute.jit
    def scale(self, rows: cute.Tensor) -> None:
        """Multiply `rows` (rows, columns) by their factors."""
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] *= self.factors[r]

    @cute.jit
    def scale_p(self) -> None:
        """Multiply P of the block before by its rows' factors, which are powers of two.

        NOTE: values that rounding has made infinite stay infinite, here and in O."""
        p = cute.make_tensor(self.tOrP.iterator, cute.make_layout(cute.size(self.tOrP)))
        factors, dtype = self.factors, self.tOrP.element_type
        if cutlass.const_expr(self.is_fp16):  # which has not all of the factors
            for i in cutlass.range_constexpr(cute.size(p)):
                p[i] = dtype(Float32(p[i]) * factors[i // 2 % 2])
        else:
            words = cute.recast_tensor(p, Int32)
            twice = [bf16_twice(factors[r]) for r in range(2)]
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = product_of_bf16(words[i], twice[i % 2])
