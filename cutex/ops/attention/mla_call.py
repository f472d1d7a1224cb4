"""The arguments of one flash_mla_with_kvcache call, and the checks that they must pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutex.kernels.attention.mla.config import HEAD_DIM, HEAD_DIM_V
from cutex.ops.attention.call import DTYPES, INTEGERS
from cutex.ops.attention.kvcache_call import MOST_ROWS, MOST_SPLITS, stepped, why_no_steps
from cutex.ops.number import number
from cutex.ops.plain import is_plain

# arguments of FlashMLA's function that belong to attention to chosen keys
SPARSE = (
    "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length",
    "extra_topk_length",
)  # fmt: skip


@dataclass(frozen=True)
class MlaCall:
    """The arguments of flash_mla_with_kvcache."""

    q: Tensor
    k_cache: Tensor
    block_table: Tensor | None
    cache_seqlens: Tensor
    head_dim_v: int = HEAD_DIM_V
    num_splits: int = 0
    softmax_scale: float | None = None
    causal: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, in the order of a plan's launch."""
        names = "q", "k_cache", "cache_seqlens", "block_table"
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    @property
    def page_size(self) -> int:
        return 0 if self.block_table is None else self.k_cache.shape[1]

    @property
    def room(self) -> int:
        """The keys that a sequence has room for."""
        rows = self.k_cache.shape[1]
        return rows if self.block_table is None else rows * self.block_table.shape[1]

    @property
    def rows(self) -> int:
        """The packed rows of a sequence."""
        return self.q.shape[1] * self.q.shape[2]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], HEAD_DIM_V)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        batch, rows, heads, _ = self.q.shape
        return batch, heads, rows

    @property
    def scale(self) -> float:
        scale = self.softmax_scale
        return float(HEAD_DIM**-0.5 if scale is None else scale)


def refuse_sparse(given: dict[str, Any], is_fp8_kvcache: bool) -> None:
    """Raise TypeError or ValueError, in one sentence, for arguments that no kernel takes."""
    for name, x in given.items():
        if name not in SPARSE:
            raise TypeError(f"flash_mla_with_kvcache() got an unexpected keyword argument {name!r}")
        if x is not None:
            raise ValueError(f"{name} is given: there is a kernel for all keys of a cache only")
    if is_fp8_kvcache:
        raise ValueError("is_fp8_kvcache=True: there is a kernel for bfloat16 and float16 only")


def check(call: MlaCall) -> None:
    """Raise TypeError or ValueError, in one sentence that names the argument, for a call that is
    not supported."""
    for name in ("q", "k_cache", "cache_seqlens", *call.tensors):
        x = getattr(call, name)
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != call.q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {call.q.device}")
        if x.layout is not torch.strided or x.is_nested:
            layout = "a nested tensor" if x.is_nested else x.layout
            raise ValueError(f"{name} must be a strided tensor, got {layout}")
    _check_operands(call)
    _check_vectors(call)
    _check_numbers(call)
    if call.q.device.type == "cpu" and all(map(is_plain, call.tensors.values())):
        _check_values(call)


def _check_operands(call: MlaCall) -> None:
    of_cache = "batch, room" if call.block_table is None else "pages, page size"
    for name, modes in (("q", "batch, tokens, heads"), ("k_cache", f"{of_cache}, 1")):
        x = getattr(call, name)
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not bfloat16 or float16")
        if x.dtype != call.q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but q has {call.q.dtype}")
        if x.dim() != 4 or x.shape[-1] != HEAD_DIM or (name == "k_cache" and x.shape[2] != 1):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be ({modes}, {HEAD_DIM})")
    if reason := why_no_steps(call.k_cache):
        raise ValueError(f"k_cache cannot be read in place: {reason}")
    pages, page = call.k_cache.shape[:2]
    steps = stepped(call.k_cache).stride()
    if pages and (pages - 1) * (steps[0] // steps[1]) + page > MOST_ROWS:
        raise ValueError(f"k_cache spans more than {MOST_ROWS} rows")
    if call.block_table is None and pages != call.q.shape[0]:
        raise ValueError(
            f"k_cache has batch size {pages}, but q has {call.q.shape[0]}; block_table says which "
            "pages are whose"
        )


def _check_vectors(call: MlaCall) -> None:
    batch = call.q.shape[0]
    for name in ("cache_seqlens", "block_table"):
        x = getattr(call, name)
        if x is not None and x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not int32")
    lengths, table = call.cache_seqlens, call.block_table
    if tuple(lengths.shape) != (batch,):
        raise ValueError(f"cache_seqlens has shape {tuple(lengths.shape)}, it must be ({batch},)")
    if table is not None and (table.dim() != 2 or table.shape[0] != batch):
        raise ValueError(f"block_table has shape {tuple(table.shape)}, it must be ({batch}, pages)")


def _check_numbers(call: MlaCall) -> None:
    if call.head_dim_v != HEAD_DIM_V:
        raise ValueError(f"head_dim_v={call.head_dim_v}: there is a kernel for {HEAD_DIM_V} only")
    if not isinstance(call.causal, bool):
        raise TypeError(f"causal must be True or False, got {call.causal!r}")
    scale = call.softmax_scale
    if scale is not None and not 0 < number("softmax_scale", scale) < 3e38:
        raise ValueError(f"softmax_scale={scale}: must be positive and finite")
    splits = call.num_splits
    if isinstance(splits, bool) or not isinstance(splits, INTEGERS):
        raise TypeError(f"num_splits must be None or an int, got {type(splits).__name__}")
    if not 0 <= splits <= MOST_SPLITS:
        raise ValueError(f"num_splits={splits}: must be from 0 to {MOST_SPLITS}, or None")


def _check_values(call: MlaCall) -> None:
    """Check what the int32 tensors hold, on the CPU only: on a GPU that would have to wait for
    it."""
    lengths, table = call.cache_seqlens, call.block_table
    if ((lengths < 0) | (lengths > call.room)).any():
        raise ValueError(
            f"cache_seqlens must be from 0 to the {call.room} keys that there is room for, got "
            f"{lengths.tolist()}"
        )
    if table is None:
        return
    pages, size = call.k_cache.shape[:2]
    for b, length in enumerate(lengths.tolist()):
        used = table[b, : -(-length // size)]
        bad = used[(used < 0) | (used >= pages)]
        if bad.numel():
            raise ValueError(
                f"block_table[{b}] has page {int(bad[0])}, k_cache has pages 0 to {pages - 1}"
            )
