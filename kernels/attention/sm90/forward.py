"""The FlashAttention forward on Hopper."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp
from cutlass.memory import SmemAllocator

from cutex.compile import Operand, Scalar
from cutex.device.atoms.mma import WARPGROUP, allocate_slots, contiguous_rows_layout, slots_layout
from cutex.device.attention.block_info import Band, BlockInfo
from cutex.device.attention.mask import Mask
from cutex.device.attention.products import (
    Product,
    a_from_smem,
    a_registers,
    make_mma,
    product,
    round_to,
)
from cutex.device.attention.rows import Rows, tma_view
from cutex.device.attention.seqlen_info import SeqlenInfo, Seqlens
from cutex.device.attention.softmax import LOG2_E, Softmax, rows_of
from cutex.device.pipeline import (
    Barrier,
    OrderedBarrier,
    PipelineState,
    Ring,
    Warps,
    publish_barriers,
)
from cutex.kernels.attention.config import ForwardConfig

STORE_BARRIER = 1  # the first of one named barrier for each warpgroup
TURN_BARRIER = 4  # the first of one for each warpgroup that takes turns


class Work(NamedTuple):
    """A tile of rows of one head of one sequence."""

    m_block: Int32
    head: Int32  # of K and V with packed heads, else of Q
    batch: Int32


class Passed(NamedTuple):
    """What the kernel is passed beside Q, K, V and O."""

    lse: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    sink: Any
    counter: Any
    scale: Any
    softcap: Any
    lo: Any
    hi: Any
    max_seqlen_q: Any


class Sizes(NamedTuple):
    batch: Int32
    heads: Int32  # of Q
    heads_kv: Int32
    seqlen_q: Int32  # static: of mode seqlen or total
    seqlen_k: Int32
    longest_q: Int32


def square_slots(dtype, rows: int, columns: int, num_slots: int) -> cute.ComposedLayout:
    """(rows, columns, SLOT), columns contiguous, in the widest swizzle that cuts them evenly."""
    swizzle = next(s for s in (128, 64, 32) if columns * dtype.width // 8 % s == 0)
    return slots_layout(dtype, rows, columns, num_slots, swizzle)


class Forward:
    """
    barrier          arrives                                waits
    q.full[slot]     1: LOAD, and the bytes by TMA          MMA, before the tile's first QK
    q.empty[slot]    1 an MMA warp, its last QK being done  LOAD
    k.full, v.full   1: LOAD, and the bytes by TMA          MMA
    k.empty, v.empty 1 an MMA warp, its product being done  LOAD
    """

    arch = "sm_90a"

    def __init__(self, config: ForwardConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "sm90_attention_forward"

    @property
    def mma_warps(self) -> Warps:
        return Warps(first=0, count=4 * self.config.warpgroups)

    @property
    def load_warps(self) -> Warps:
        return Warps(first=self.mma_warps.end, count=4)

    @property
    def num_threads(self) -> int:
        return self.mma_warps.threads + self.load_warps.threads

    @property
    def registers(self) -> tuple[int, int]:
        """Of a load thread and of an MMA thread."""
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.config.warpgroups]

    def operands(self, dtype: str) -> tuple[Any, ...]:
        c = self.config
        q = ("tq", "h", "d") if c.varlen_q else ("b", "sq", "h", "d")
        k = ("tk", "hk", "d") if c.varlen_k else ("b", "sk", "hk", "d")
        v = (*k[:-1], "dv")
        o = (*q[:-1], "dv")
        found: list[Any] = [
            Operand(name, sizes, dtype) for name, sizes in (("q", q), ("k", k), ("v", v), ("o", o))
        ]
        if c.lse:
            lse = ("h", "tq") if c.varlen_q else ("b", "h", "sq")
            found.append(Operand("lse", lse, "fp32", aligned=False, whole=False))
        for name, there in (
            ("cu_seqlens_q", c.varlen_q),
            ("cu_seqlens_k", c.varlen_k),
            ("seqused_q", c.used_q),
            ("seqused_k", c.used_k),
        ):
            if there:
                size = "b1" if name.startswith("cu") else "b"
                found.append(Operand(name, (size,), "int32", aligned=False, whole=False))
        if c.sink:
            found.append(Operand("sink", ("h",), "fp32", aligned=False, whole=False))
        if c.dispatch == "dynamic":
            found.append(Operand("counter", ("two",), "int32", aligned=False, whole=False))
        found.append(Scalar("scale"))
        if c.softcap:
            found.append(Scalar("softcap"))
        found += [Scalar(n, "int32") for n, there in zip(("lo", "hi"), c.window) if there]
        if c.varlen_q:
            found.append(Scalar("max_seqlen_q", "int32"))
        return tuple(found)

    def passed(self, rest: list[Any]) -> Passed:
        c = self.config
        take = lambda there: rest.pop(0) if there else None
        return Passed(
            take(c.lse),
            take(c.varlen_q),
            take(c.varlen_k),
            take(c.used_q),
            take(c.used_k),
            take(c.sink),
            take(c.dispatch == "dynamic"),
            take(True),
            take(c.softcap),
            take(c.window[0]),
            take(c.window[1]),
            take(c.varlen_q),
        )

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, *rest
    ) -> None:
        c = self.config
        stream = rest[-1]
        passed = self.passed(list(rest[:-1]))
        dtype = mQ.element_type
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q = self._operand(load, mQ, c.pack, c.ragged_q, 64, c.head_dim, c.warpgroups * c.q_stages)
        k = self._operand(load, mK, 1, c.ragged_k, c.tile_n, c.head_dim, c.num_stages)
        v = self._operand(load, mV, 1, c.ragged_k, c.tile_n, c.head_dim_v, c.num_stages)
        o = self._operand(
            store,
            mO,
            c.pack,
            c.ragged_q,
            64,
            c.head_dim_v,
            c.warpgroups * (1 if c.own_o else c.q_stages),
        )
        batch = (
            cute.size(mQ, mode=[0])
            if not c.varlen_q
            else cute.size(passed.cu_seqlens_q, mode=[0]) - 1
        )
        seqlen_q = cute.size(mQ, mode=[0 if c.varlen_q else 1])
        seqlen_k = cute.size(mK, mode=[0 if c.varlen_k else 1])
        longest_q = passed.max_seqlen_q if c.varlen_q else seqlen_q
        sizes = Sizes(
            Int32(batch),
            Int32(cute.size(mQ, mode=[1 if c.varlen_q else 2])),
            Int32(cute.size(mK, mode=[1 if c.varlen_k else 2])),
            Int32(seqlen_q),
            Int32(seqlen_k),
            Int32(longest_q),
        )
        total = self.num_m_blocks(sizes) * (sizes.heads // c.pack) * sizes.batch
        grid = total if c.dispatch == "one" else cutlass.min(Int32(c.num_ctas), total)
        self.kernel(q, k, v, o, passed, sizes).launch(
            grid=(grid, 1, 1), block=(self.num_threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    def _operand(self, op, mX, pack: int, ragged: bool, rows: int, columns: int, slots: int):
        layout = square_slots(mX.element_type, rows, columns, slots)
        view = tma_view(mX, pack, ragged)
        tiler = ((pack, rows // pack), columns) if pack > 1 else (rows, columns)
        return cpasync.make_tiled_tma_atom(op, view, layout, tiler)

    def num_m_blocks(self, sizes: Sizes) -> Int32:
        return cute.ceil_div(sizes.longest_q * self.config.pack, self.config.tile_m)

    def band(self, passed: Passed) -> Band:
        return Band(passed.lo, 0 if self.config.causal else passed.hi)

    @cute.kernel
    def kernel(
        self,
        q: cpasync.TmaInfo,
        k: cpasync.TmaInfo,
        v: cpasync.TmaInfo,
        o: cpasync.TmaInfo,
        passed: Passed,
        sizes: Sizes,
    ) -> None:
        c = self.config
        dtype = q.atom.value_type
        smem = SmemAllocator()
        sQ = allocate_slots(smem, dtype, q.smem_layout)  # (64, D, WG * SLOT)
        sK = allocate_slots(smem, dtype, k.smem_layout)  # (bN, D, SLOT)
        sV = allocate_slots(smem, dtype, v.smem_layout)  # (bN, DV, SLOT)
        if cutlass.const_expr(c.own_o):
            sO = allocate_slots(smem, dtype, o.smem_layout)  # (64, DV, WG)
        else:
            sO = cute.make_tensor(sQ.iterator, o.smem_layout.outer)
        work = smem.allocate_array(Int32, 4 * c.q_stages)
        sWork = cute.make_tensor(work, cute.make_layout((4, c.q_stages)))
        consumers = self.mma_warps.count
        q_ring = Ring.allocate(smem, "q", c.q_stages, c.q_bytes, consumers)
        k_ring = Ring.allocate(smem, "k", c.num_stages, c.k_bytes, consumers)
        v_ring = Ring.allocate(smem, "v", c.num_stages, c.v_bytes, consumers)
        publish_barriers((q_ring, k_ring, v_ring))
        lens_q = Seqlens(sizes.seqlen_q, passed.cu_seqlens_q, passed.seqused_q)
        lens_k = Seqlens(sizes.seqlen_k, passed.cu_seqlens_k, passed.seqused_k)
        info = BlockInfo(c.tile_m, c.tile_n, self.band(passed), c.pack)
        warp = cute.arch.warp_idx()
        if warp >= self.load_warps.first:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == self.load_warps.first:
                self.load(
                    (q, k, v),
                    (sQ, sK, sV),
                    (q_ring, k_ring, v_ring),
                    sWork,
                    (lens_q, lens_k),
                    info,
                    sizes,
                    passed,
                )
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.compute(
                o, (sQ, sK, sV, sO), (q_ring, k_ring, v_ring), sWork, (lens_q, lens_k), info, passed
            )

    # ---- scheduling

    @cute.jit
    def work_of(self, index: Int32, sizes: Sizes) -> Work:
        """Longest first: blocks of rows from the last on, over groups of heads whose K and V fit L2."""
        c = self.config
        num_m_blocks = self.num_m_blocks(sizes)
        heads = sizes.heads // c.pack
        per_kv = sizes.heads // c.pack // sizes.heads_kv
        if cutlass.const_expr(not (c.causal or c.window[0] or c.window[1])):
            unit = index // num_m_blocks
            return Work(index % num_m_blocks, unit % heads, unit // heads)
        bytes_of_head = sizes.seqlen_k * (c.head_dim + c.head_dim_v) * 2
        group = cutlass.max(Int32(c.l2_bytes) // bytes_of_head, 1) * per_kv
        units = heads * sizes.batch
        group = cutlass.min(group, units)
        in_group = group * num_m_blocks
        number = index // in_group
        rest = index - number * in_group
        here = cutlass.min(group, units - number * group)
        m_block = num_m_blocks - 1 - rest // here
        unit = number * group + rest % here
        return Work(m_block, unit % heads, unit // heads)

    # ---- load

    @cute.jit
    def load(self, infos, slots, rings, sWork, lens, info, sizes: Sizes, passed: Passed) -> None:
        c = self.config
        q_rows = Rows(infos[0], c.pack, c.ragged_q)
        k_rows, v_rows = Rows(infos[1], 1, c.ragged_k), Rows(infos[2], 1, c.ragged_k)
        q_ring, k_ring, v_ring = rings
        q_fill, k_fill, v_fill = q_ring.producer(), k_ring.producer(), v_ring.producer()
        per_kv = sizes.heads // c.pack // sizes.heads_kv
        total = self.num_m_blocks(sizes) * (sizes.heads // c.pack) * sizes.batch
        grid, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        while index < total:
            work = self.work_of(index, sizes)
            seq_q, seq_k = lens[0].of(work.batch), lens[1].of(work.batch)
            if work.m_block * c.tile_m < seq_q.length * c.pack:
                blocks = info.n_blocks(work.m_block, seq_q.length, seq_k.length)
                gQ = self._tiles(q_rows, slots[0], work.head, work.batch, seq_q)
                head_kv = work.head // per_kv
                gK = self._tiles(k_rows, slots[1], head_kv, work.batch, seq_k)
                gV = self._tiles(v_rows, slots[2], head_kv, work.batch, seq_k)
                some = blocks.end > blocks.first
                if some:
                    gK.load(blocks.end - 1, k_fill.slot, k_ring.acquire(k_fill))
                    k_fill.advance()
                q_ring.empty.wait(q_fill.phase, q_fill.slot)
                with cute.arch.elect_one():
                    sWork[0, q_fill.slot] = work.m_block
                    sWork[1, q_fill.slot] = work.head
                    sWork[2, q_fill.slot] = work.batch
                    sWork[3, q_fill.slot] = Int32(1)
                    q_ring.full.arrive_expecting(c.q_bytes, q_fill.slot)
                for wg in cutlass.range_constexpr(c.warpgroups):
                    part = work.m_block * c.warpgroups + wg
                    gQ.load(part, q_fill.slot * c.warpgroups + wg, q_ring.full[q_fill.slot])
                q_fill.advance()
                if some:
                    for i in cutlass.range(blocks.first + 1, blocks.end, unroll=1):
                        n_block = blocks.end - 1 - (i - blocks.first)
                        gK.load(n_block, k_fill.slot, k_ring.acquire(k_fill))
                        k_fill.advance()
                        gV.load(n_block + 1, v_fill.slot, v_ring.acquire(v_fill))
                        v_fill.advance()
                    gV.load(blocks.first, v_fill.slot, v_ring.acquire(v_fill))
                    v_fill.advance()
            index = self.next_index(index, grid, total, passed)
        q_ring.empty.wait(q_fill.phase, q_fill.slot)
        with cute.arch.elect_one():
            sWork[3, q_fill.slot] = Int32(0)
            q_ring.full.arrive(q_fill.slot)

    @cute.jit
    def next_index(self, index: Int32, grid: Int32, total: Int32, passed: Passed) -> Int32:
        c = self.config
        if cutlass.const_expr(c.dispatch == "one"):
            return total
        if cutlass.const_expr(c.dispatch == "static"):
            return index + grid
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = grid + cute.arch.atomic_add(
                passed.counter.iterator, Int32(1), sem="relaxed", scope="gpu"
            )
            if taken == total + grid - 1:  # the last to ask leaves it as it was
                passed.counter[0] = Int32(0)
        return cute.arch.shuffle_sync(taken, 0)

    @cute.jit
    def _tiles(
        self, rows: Rows, sX: cute.Tensor, head: Int32, batch: Int32, seqlen: SeqlenInfo
    ) -> Any:
        from cutex.device.atoms.tma import TileLoads

        tiler = rows.tiler(cute.size(sX, mode=[0]), cute.size(sX, mode=[1]))
        mX = rows.of(head, batch, seqlen)
        first = ((0, None), 0) if rows.pack > 1 else (None, 0)
        gX = cute.local_tile(mX, tiler, first)  # (bRows, D, Rest)
        tXsX, tXgX = cpasync.tma_partition(
            rows.info.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(sX, 0, 2),
            cute.group_modes(gX, 0, 2),
        )
        return TileLoads(rows.info.atom, tXgX, tXsX)

    # ---- compute

    @cute.jit
    def compute(self, o, slots, rings, sWork, lens, info, passed: Passed) -> None:
        c = self.config
        sQ, sK, sV, sO = slots
        q_ring, k_ring, v_ring = rings
        dtype = sQ.element_type
        thread, _, _ = cute.arch.thread_idx()
        qk = product(make_mma(1, c.tile_n, dtype, c.q_in_registers, False), sK)
        vt = contiguous_rows_layout(dtype, c.head_dim_v, c.tile_n, c.num_stages)
        sVt = cute.make_tensor(sV.iterator, vt.outer)  # (DV, bN, SLOT)
        pv = product(make_mma(1, c.head_dim_v, dtype, True, True), sVt)
        if cutlass.const_expr(c.q_in_registers):
            tSrQ = a_registers(c.head_dim, dtype)
        else:
            tSrQ = a_from_smem(qk.tiled_mma, sQ)  # (MMA, MMA_M, MMA_K, WG * SLOT)
        acc_o = pv.accumulator(c.head_dim_v)
        tOrP = a_registers(c.tile_n, dtype)
        q_take, k_take, v_take = q_ring.consumer(), k_ring.consumer(), v_ring.consumer()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        turns = OrderedBarrier(TURN_BARRIER)
        if cutlass.const_expr(c.pingpong != ""):
            if wg == c.warpgroups - 1:
                turns.signal(0)
        scale_log2 = passed.scale * LOG2_E
        q_ring.wait_full(q_take)
        while sWork[3, q_take.slot] != 0:
            work = Work(sWork[0, q_take.slot], sWork[1, q_take.slot], sWork[2, q_take.slot])
            seq_q, seq_k = lens[0].of(work.batch), lens[1].of(work.batch)
            blocks = info.n_blocks(work.m_block, seq_q.length, seq_k.length)
            row = work.m_block * c.tile_m + wg * 64 + thread % 128 // 32 * 16 + thread % 32 // 4
            mask = Mask(
                info.band,
                c.tile_n,
                seq_q.length,
                seq_k.length,
                (row // c.pack, (row + 8) // c.pack),
                thread % 4,
            )
            softmax = Softmax.start(scale_log2, c.slack)
            factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            q_part = q_take.slot * c.warpgroups + wg
            if blocks.end > blocks.first:
                tSrQ_here = tSrQ
                if cutlass.const_expr(c.q_in_registers):
                    self.load_q(qk.tiled_mma, sQ[None, None, q_part], tSrQ)
                    q_ring.release(q_take)
                else:
                    tSrQ_here = tSrQ[None, None, None, q_part]
                k_take, v_take = self.mainloop(
                    qk,
                    pv,
                    tSrQ_here,
                    (acc_o, tOrP),
                    (k_ring, v_ring),
                    (k_take, v_take),
                    blocks,
                    mask,
                    softmax,
                    factors,
                    turns,
                    wg,
                )
                if cutlass.const_expr(c.own_o and not c.q_in_registers):
                    q_ring.release(q_take)
                softmax.finish(None, factors, lse)
                rO = rows_of(acc_o)
                for r in cutlass.range_constexpr(2):
                    for col in cutlass.range_constexpr(cute.size(rO, mode=[1])):
                        rO[r, col] *= factors[r]
            else:
                if cutlass.const_expr(c.own_o):
                    q_ring.release(q_take)
                acc_o.fill(0.0)
                lse.fill(-Float32.inf)
            self.store(
                o, sO, q_part if not c.own_o else wg, acc_o, lse, work, seq_q, passed, row, wg
            )
            if cutlass.const_expr(not c.own_o):
                if thread % WARPGROUP < 32:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                q_ring.release(q_take)
            q_take.advance()
            q_ring.wait_full(q_take)
        if thread % WARPGROUP < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def load_q(self, tiled_mma, sQ: cute.Tensor, tSrQ: cute.Tensor) -> None:
        """This warpgroup's rows of Q (64, D) into registers."""
        thread, _, _ = cute.arch.thread_idx()
        atom = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), sQ.element_type)
        s2r = cute.make_tiled_copy_A(atom, tiled_mma).get_slice(thread % WARPGROUP)
        tXsQ = s2r.partition_S(sQ)
        cute.copy(s2r, tXsQ, s2r.retile(tSrQ))

    @cute.jit
    def mainloop(self, qk, pv, tSrQ, accs, rings, takes, blocks, mask, softmax, factors, turns, wg):
        c = self.config
        acc_o, tOrP = accs
        k_ring, v_ring = rings
        k_take, v_take = takes
        acc_s = qk.accumulator(c.tile_n)  # NOTE: fresh, so that nothing of the last block is kept
        rS = rows_of(acc_s)
        n_block = blocks.end - 1
        k_ring.wait_full(k_take)
        qk.issue(acc_s, tSrQ, k_take.slot, False)
        warpgroup.wait_group(0)
        k_ring.release(k_take)
        k_take.advance()
        mask.apply(rS, n_block)
        softmax.first(rS)
        round_to(tOrP, acc_s)
        acc_o.fill(0.0)
        n_block -= 1
        what = (qk, pv, tSrQ, accs, rings, mask, softmax, factors, turns, wg)
        state = (k_take, v_take)
        clean_from = blocks.first
        if cutlass.const_expr(mask.band.hi is not None):
            masked = cutlass.max(blocks.end - 1 - blocks.clean_end, 0)
            state = self.steps(what, state, n_block, masked, "masked")
            n_block -= masked
        if cutlass.const_expr(mask.band.lo is not None):
            clean_from = cutlass.min(blocks.clean_first, n_block + 1)
        clean = n_block + 1 - clean_from
        if cutlass.const_expr(c.optimistic and mask.band.hi is not None):
            safe = cutlass.min(clean, 1)
            state = self.steps(what, state, n_block, safe, "safe")
            n_block -= safe
            clean -= safe
        state = self.steps(what, state, n_block, clean, "fast" if c.optimistic else "safe")
        n_block -= clean
        if cutlass.const_expr(mask.band.lo is not None):
            state = self.steps(what, state, n_block, n_block + 1 - blocks.first, "masked")
        k_take, v_take = state
        v_ring.wait_full(v_take)
        pv.issue(acc_o, tOrP, v_take.slot, True)
        warpgroup.wait_group(0)
        v_ring.release(v_take)
        v_take.advance()
        return k_take, v_take

    @cute.jit
    def steps(self, what, state, n_block: Int32, count: Int32, kind: cutlass.Constexpr[str]):
        k_take, v_take = state
        for _ in cutlass.range(count, unroll=1):
            k_take, v_take = self.step(what, (k_take, v_take), n_block, kind)
            n_block -= 1
        return k_take, v_take

    @cute.jit
    def step(self, what, takes, n_block: Int32, kind: cutlass.Constexpr[str]):
        """One block of keys: QK of it, and PV of the one before under its softmax."""
        c = self.config
        qk, pv, tSrQ, accs, rings, mask, softmax, factors, turns, wg = what
        acc_o, tOrP = accs
        k_ring, v_ring = rings
        k_take, v_take = takes
        acc_s = qk.accumulator(c.tile_n)  # NOTE: fresh, so that nothing of the last block is kept
        rS = rows_of(acc_s)
        k_ring.wait_full(k_take)
        if cutlass.const_expr(c.pingpong == "gemm"):
            turns.wait(wg)
        qk.issue(acc_s, tSrQ, k_take.slot, False)
        v_ring.wait_full(v_take)
        pv.issue(acc_o, tOrP, v_take.slot, True)
        if cutlass.const_expr(c.pingpong == "gemm"):
            turns.signal((wg + 1) % c.warpgroups)
        warpgroup.wait_group(1)
        k_ring.release(k_take)
        k_take.advance()
        if cutlass.const_expr(kind == "masked"):
            mask.apply(rS, n_block)
        rescale = Boolean(False)
        if cutlass.const_expr(kind == "fast"):
            softmax.add(rS)
        else:
            rescale = softmax.next(rS, factors)
        warpgroup.wait_group(0)
        v_ring.release(v_take)
        v_take.advance()
        round_to(tOrP, acc_s)
        if cutlass.const_expr(kind != "fast"):
            self.rescale(rescale, acc_o, factors)
        return k_take, v_take

    @cute.jit
    def rescale(self, when: Boolean, acc_o, factors) -> None:
        if when:
            rO = rows_of(acc_o)
            for r in cutlass.range_constexpr(2):
                for col in cutlass.range_constexpr(cute.size(rO, mode=[1])):
                    rO[r, col] *= factors[r]

    @cute.jit
    def store(self, o, sO, slot, acc_o, lse, work, seq_q, passed, row, wg) -> None:
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        barrier = STORE_BARRIER + wg
        mine = thread % WARPGROUP < 32
        if cutlass.const_expr(c.own_o):
            if mine:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        mma = make_mma(1, c.head_dim_v, sO.element_type, True, True)
        to_smem = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), sO.element_type)
        r2s = cute.make_tiled_copy_C(to_smem, mma)
        tRS_sO = r2s.get_slice(thread % WARPGROUP).partition_D(sO[None, None, slot])
        tRS_rO = cute.make_rmem_tensor(tRS_sO.shape, sO.element_type)
        flat = cute.make_layout(cute.size(acc_o))
        cute.make_tensor(tRS_rO.iterator, flat).store(
            cute.make_tensor(acc_o.iterator, flat).load().to(sO.element_type)
        )
        cute.copy(r2s, tRS_rO, tRS_sO)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if mine:
            rows = Rows(o, c.pack, c.ragged_q)
            mO = rows.of(work.head, work.batch, seq_q)
            first = ((0, None), 0) if c.pack > 1 else (None, 0)
            gO = cute.local_tile(mO, rows.tiler(64, c.head_dim_v), first)
            bSG_sO, bSG_gO = cpasync.tma_partition(
                o.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(sO, 0, 2),
                cute.group_modes(gO, 0, 2),
            )
            cute.copy(o.atom, bSG_sO[None, slot], bSG_gO[None, work.m_block * c.warpgroups + wg])
            cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(c.lse):
            self.store_lse(passed.lse, lse, work, seq_q, row)

    @cute.jit
    def store_lse(self, mLSE, lse, work, seq_q, row) -> None:
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        for r in cutlass.range_constexpr(2):
            packed = row + 8 * r
            query, head = packed // c.pack, work.head * c.pack + packed % c.pack
            if thread % 4 == 0 and query < seq_q.length:
                if cutlass.const_expr(c.varlen_q):
                    mLSE[head, seq_q.offset + query] = lse[r]
                else:
                    mLSE[work.batch, head, query] = lse[r]
