"""The launches of sums of rows by an index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.compile import ALIGN
from cutex.ops.grouped.launch import again, arch_for, ends, with_padding
from cutex.ops.matmul.arrange import aligned, normal, repacked


def summed(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """out[i] = the sum of the rows (R, D) whose index (R,) is i, with out (S, D) in memory of
    `empty`, and R, S and D above 0."""
    from cutex.kernels.mixture.counting import CTAS
    from cutex.kernels.mixture.listed import BITS, BUCKETS, Listed, ListedConfig
    from cutex.kernels.mixture.summed import CHUNK, LONG, Summed, SummedConfig

    def numbers(*shape: int) -> Tensor:
        return rows.new_empty(shape, dtype=torch.int32)

    (count, columns), index = rows.shape, ends(index.int())
    order, other, spans = numbers(count), numbers(count), numbers(out.shape[0], 2)
    passes = max(1, -(-(out.shape[0] - 1).bit_length() // BITS))
    run(Listed, ListedConfig(passes), [index, order, spans, other, numbers(CTAS, BUCKETS)])
    whole = columns * rows.element_size() % ALIGN == 0
    rows = normal(rows, -1) if whole and aligned(rows, -1) else with_padding(repacked(rows, -1))
    chunks = count // CHUNK if count > LONG else 0
    sums = rows.new_empty((max(1, chunks), rows.shape[1]), dtype=torch.float32)
    for of_chunks in (True, False) if chunks else (False,):
        run(Summed, SummedConfig(of_chunks), [rows, index, order, spans, sums, with_padding(out)])


def run(kind: Any, config: Any, passed: list[Tensor]) -> None:
    """Launch the kernel of a config on `passed`."""

    def call(_: Any, tensors: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
        return config, arch_for(tensors[0]), tensors

    again(kind, (config,), passed, call)
