"""What MLA's kernels of all archs share: how they are compiled, and Combine, the merge of parts, of
MLA's units and with its LSE."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from cutlass import Float32, Int32, cute

from cutex.compile import Argument
from cutex.kernels.attention.decode.out import Combine, Out
from cutex.kernels.attention.decode.shared import Rows
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.mla.config import MlaConfig
from cutex.kernels.attention.mla.signature import arguments, blocks_of_rows

Config = TypeVar("Config", bound=MlaConfig)


def rows_of(args: KernelArgs, sizes: Sizes, batch: Int32, owner: Int32, tile_m: int) -> Rows:
    """The rows of a unit."""
    m_blocks = blocks_of_rows(sizes, tile_m)
    head = owner // m_blocks
    seq_q = sizes.queries(args, batch)
    return Rows(batch, owner - head * m_blocks, head, seq_q, sizes.pack, tile_m)


class MlaOut(Out):
    """Where results are written; LSE of rows without keys is +inf, as FlashMLA's."""

    @cute.jit
    def store_lse(self, lse: Float32, rows: Rows, row: Int32) -> None:
        Out.store_lse(self, Float32.inf if lse == -Float32.inf else lse, rows, row)


class MlaCombine(Combine):
    """The merge of the parts of MLA's units, which count blocks of rows."""

    out: ClassVar[type[Out]] = MlaOut

    def rows(self, args: KernelArgs, sizes: Sizes, unit: Int32) -> Rows:
        batch = unit // sizes.heads
        return rows_of(args, sizes, batch, unit - batch * sizes.heads, self.config.tile_m)


class MlaKernel(Generic[Config]):
    """What the MLA kernels of all archs are to who compiles and launches them."""

    name: str
    kernel: Any

    def __init__(self, config: Config) -> None:
        if reason := config.why_not():
            raise ValueError(reason)
        self.config = config

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return arguments(self.config, dtype)

    @property
    def kernels(self) -> dict[str, Any]:
        return {"mla": type(self).kernel, "combine": MlaCombine.kernel}
