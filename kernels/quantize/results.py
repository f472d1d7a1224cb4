"""What a tile's results are in smem, and how they leave it."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.kernels.quantize.config import TILE, QuantizeConfig
from cutex.kernels.quantize.elements import Elements, float_of

THREADS = 256


class Results:
    """The elements of columns, turned, and swizzled factors, which meet in smem; rows' elements go
    straight to memory."""

    config: QuantizeConfig
    elements: Elements

    @property
    def per_word(self) -> int:
        """The elements in a word of 32 bits."""
        return 32 // self.elements.bits

    @property
    def factors(self) -> int:
        """The factors of a tile, along one side."""
        return TILE * TILE // self.config.block

    @property
    def gathers(self) -> bool:
        """Whether fp32 factors of a tile's rows and columns meet in smem: those of a column have
        several threads, and those of a pass's rows are less than a sector."""
        c = self.config
        return c.of.scale == "fp32" and not c.square and c.columns

    def allocate_turned(self, smem: SmemAllocator) -> Any:
        """The slot of columns' results; None where they are where x was, or nowhere."""
        c = self.config
        if not c.aligned_columns or c.reuses:
            return None
        return smem.allocate_tensor(Int32, cute.make_layout(TILE * TILE // self.per_word), 16)

    def turned(self, slot: Any, sX: cute.Tensor) -> Any:
        """Columns' results in smem, words (bK, bM)."""
        if not self.config.aligned_columns:
            return None
        words = TILE // self.per_word
        first = cute.recast_ptr(sX.iterator, dtype=Int32) if slot is None else slot.iterator
        return cute.make_tensor(first, cute.make_layout((TILE, words), stride=(words, 1)))

    def allocate_factors(self, smem: SmemAllocator) -> Any:
        """The factors of a tile (FACTOR, SIDE) where they are swizzled."""
        c = self.config
        sides = int(c.rows) + int(c.columns)
        if self.gathers:
            return smem.allocate_tensor(cutlass.Float32, cute.make_layout((TILE, sides)), 16)
        if not c.swizzled:
            return None
        return smem.allocate_tensor(cutlass.Uint8, cute.make_layout((self.factors, sides)), 16)

    def swizzled(self, row: Int32, word: Any) -> Any:
        """The place of a word of a row of sQ: units of 16 bytes are permuted by XOR with the number
        of the pair of rows, so that threads, a pair each, write to different banks."""
        units = TILE // self.per_word // 4
        return (word // 4 ^ row // 2 % units) * 4 + word % 4

    @cute.jit
    def leave(
        self,
        sQ: cute.Tensor,
        column: Int32,
        row: Int32,
        words: cutlass.Constexpr[list[Any]],
    ) -> None:
        """Write the words of a column's elements from `row` on to sQ, up to 16 bytes at a time."""
        at_once = min(4, len(words))
        rWords = cute.make_rmem_tensor(len(words), Int32)
        for i in cutlass.range_constexpr(len(words)):
            rWords[i] = words[i]
        for i in cutlass.range_constexpr(0, len(words), at_once):
            to = self.swizzled(column, row // self.per_word + i)
            there = cute.local_tile(sQ[column, None], (at_once,), (to // at_once,))  # (bWords)
            cute.autovec_copy(cute.local_tile(rWords, (at_once,), (i // at_once,)), there)

    @cute.jit
    def leave_factor(
        self, sF: cute.Tensor, row: Int32, k: Int32, code: Int32, group: cutlass.Constexpr[int]
    ) -> None:
        """Write the factor of the block of `row` of the tile that begins at `k` to where the
        swizzled layout has it; the first of `group` threads does."""
        byte = self.factor_byte(row, k)
        if cute.arch.thread_idx()[0] % group == 0:
            sF[byte] = code.to(cutlass.Uint8)

    def factor_byte(self, row: Int32, k: Int32) -> Int32:
        """Where the swizzled layout has the factor of the block of `row` that begins at `k`."""
        block = k // self.config.block
        return block // 4 * (4 * TILE) + row % 32 * 16 + row // 32 * 4 + block % 4

    def store_rest(
        self, sQ: Any, sF: Any, row_tile: Int32, column_tile: Int32, mX: cute.Tensor, rest: Any
    ) -> None:
        """Store what smem has of a tile's results."""
        c = self.config
        if c.columns and c.aligned_columns:
            self.store_turned(sQ, row_tile, column_tile, mX, rest[-2])
        if c.swizzled and c.rows:
            self.store_factors(rest[1], sF[None, 0], row_tile, column_tile, mX.shape[1], 0)
        if c.swizzled and c.columns:
            side, there = int(c.rows), (column_tile, row_tile)
            self.store_factors(rest[-1], sF[None, side], *there, mX.shape[0], side)
        if self.gathers:
            side = int(c.rows)
            if c.rows:
                self.store_gathered(rest[1], sF[None, 0], row_tile, column_tile, mX.shape[0], 0)
            of_columns = sF[None, side]
            self.store_gathered(rest[-1], of_columns, column_tile, row_tile, mX.shape[1], side)

    @cute.jit
    def store_gathered(
        self,
        mFactors: cute.Tensor,
        sF: cute.Tensor,
        row_tile: Int32,
        block: Int32,
        rows: Int32,
        side: cutlass.Constexpr[int],
    ) -> None:
        """Store the fp32 factors of one side of the tile, which is a block of it. Each side by
        threads of its own."""
        thread = cute.arch.thread_idx()[0] - side * TILE
        row = row_tile * TILE + thread
        if (thread >= 0) & (thread < TILE) & (row < rows):
            mFactors[row, block] = sF[thread]

    @cute.jit
    def store_turned(
        self,
        sQ: cute.Tensor,
        row_tile: Int32,
        column_tile: Int32,
        mX: cute.Tensor,
        mData: cute.Tensor,
    ) -> None:
        """Store the tile of x transposed from smem, neighbouring threads neighbouring units of 16
        bytes."""
        rows, columns = mX.shape
        units = TILE // self.per_word // 4
        for i in cutlass.range_constexpr(TILE * units // THREADS):
            at = cute.arch.thread_idx()[0] + i * THREADS
            row, unit = at // units, at % units
            words = [sQ[row, self.swizzled(row, unit * 4 + n)] for n in range(4)]
            column = column_tile * TILE + row
            if column < columns:
                first = row_tile * TILE + unit * 4 * self.per_word
                self.store_words(mData, column, first, words, rows, True)

    @cute.jit
    def store_factors(
        self,
        mFactors: cute.Tensor,
        sF: cute.Tensor,
        row_tile: Int32,
        column_tile: Int32,
        columns: Int32,
        side: cutlass.Constexpr[int],
    ) -> None:
        """Store the factors of one side of the tile, 16 bytes a thread; those of padding are
        zeros. Each side by threads of its own."""
        c = self.config
        thread = cute.arch.thread_idx()[0] - side * (self.factors // 16)
        tiles = cute.ceil_div(columns, 4 * c.block)
        tile = column_tile * (TILE // c.block // 4) + thread // 32
        if (thread >= 0) & (thread < self.factors // 16) & (tile < tiles):
            byte = (row_tile * tiles + tile) * (4 * TILE) + thread % 32 * 16
            address = mFactors.iterator.toint() + cutlass.Int64(byte)
            to = cute.make_ptr(cutlass.Uint8, address, cute.AddressSpace.gmem, assumed_align=16)
            vector = cute.local_tile(sF, (16,), (thread,))
            cute.autovec_copy(vector, cute.make_tensor(to, cute.make_layout(16)))

    @cute.jit
    def store_words(
        self,
        mData: cute.Tensor,
        row: Int32,
        column: Int32,
        words: cutlass.Constexpr[list[Any]],
        columns: Int32,
        aligned: cutlass.Constexpr[bool],
    ) -> None:
        """Store words of elements of one row from `column` on; those beyond `columns` are left
        out."""
        packed = self.config.packed
        if cutlass.const_expr(aligned):
            rWords = cute.make_rmem_tensor(len(words), Int32)
            for i in cutlass.range_constexpr(len(words)):
                rWords[i] = words[i]
            if column < columns:
                address = mData.iterator.toint() + (
                    cutlass.Int64(row) * mData.stride[0] + column // packed
                )
                to = cute.make_ptr(
                    Int32, address, cute.AddressSpace.gmem, assumed_align=4 * len(words)
                )
                cute.autovec_copy(rWords, cute.make_tensor(to, cute.make_layout(len(words))))
        else:
            for i in cutlass.range_constexpr(4 * len(words)):
                if column + i * packed < columns:
                    byte = words[i // 4] >> (i % 4 * 8)
                    mData[row, column // packed + i] = Int32(byte).to(cutlass.Uint8)

    @cute.jit
    def store_factor(
        self,
        mFactors: cute.Tensor,
        row: Int32,
        column: Int32,
        code: Int32,
        rows: Int32,
        columns: Int32,
        group: cutlass.Constexpr[int],
    ) -> None:
        """Store the factor of the block of `row` that begins at `column`; the first of `group`
        threads does. Swizzled, those of padding are zeros."""
        c = self.config
        block = column // c.block
        first = cute.arch.thread_idx()[0] % group == 0
        if cutlass.const_expr(c.swizzled):
            tiles = cute.ceil_div(columns, 4 * c.block)
            byte = (row // TILE * tiles + block // 4) * 512 + row % 32 * 16 + row % TILE // 32 * 4
            if first & (block // 4 < tiles):
                mFactors[byte + block % 4] = code.to(cutlass.Uint8)
        else:
            there = first & (row < rows) & (column < columns)
            if cutlass.const_expr(c.square):
                there = there & (row % TILE == 0) & (column % TILE == 0)
                row = row // TILE
            if there:
                if cutlass.const_expr(c.of.scale == "fp32"):
                    mFactors[row, block] = float_of(code)
                else:
                    mFactors[row, block] = code.to(cutlass.Uint8)
