"""The arguments of one flash_mla_with_kvcache call, and the checks that they must pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutex.kernels.attention.mla.config import HEAD_DIM, HEAD_DIM_V
from cutex.ops.attention.cache import (
    MOST_SPLITS,
    check_in_place,
    check_lengths,
    check_pages,
    check_table,
    check_tensors,
    room_of,
)
from cutex.ops.attention.call import DTYPES, INTEGERS
from cutex.ops.number import check_flag, number
from cutex.ops.plain import is_plain

# arguments of FlashMLA's function that belong to attention to chosen keys, and have no kernel
SPARSE = "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"
CHOSEN = "indices", "topk_length"  # those that have one


TENSORS = 4  # of the fields of an MlaCall, the first


class MlaCall(NamedTuple):
    """The arguments of flash_mla_with_kvcache: tensors, in the order of a plan's launch, and
    numbers."""

    q: Tensor
    k_cache: Tensor
    cache_seqlens: Tensor | None  # None: of chosen keys, all of which count
    block_table: Tensor | None
    head_dim_v: int
    num_splits: int
    softmax_scale: float | None
    causal: bool

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, in the order of a plan's launch."""
        given = zip(self._fields[:TENSORS], self[:TENSORS], strict=True)
        return {name: x for name, x in given if x is not None}

    @property
    def page_size(self) -> int:
        return 0 if self.block_table is None else self.k_cache.shape[1]

    @property
    def room(self) -> int:
        """The keys that a sequence has room for."""
        return room_of(self.k_cache, self.block_table)

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
        if name not in SPARSE + CHOSEN:
            raise TypeError(f"flash_mla_with_kvcache() got an unexpected keyword argument {name!r}")
        if x is not None and name not in CHOSEN:
            raise ValueError(f"{name} is given: there is no kernel for it")
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    if is_fp8_kvcache:
        raise ValueError("is_fp8_kvcache=True: there is a kernel for bfloat16 and float16 only")


def check(call: MlaCall) -> None:
    """Raise TypeError or ValueError, in one sentence that names the argument, for a call that is
    not supported."""
    names = "q", "k_cache", "cache_seqlens", *call.tensors
    check_tensors((name, getattr(call, name)) for name in names)
    check_operands(call)
    _check_vectors(call)
    check_numbers(call)
    if call.q.device.type == "cpu" and all(map(is_plain, call.tensors.values())):
        _check_values(call)


def check_operands(call: MlaCall) -> None:
    """Raise TypeError or ValueError for a q or a cache that no kernel takes."""
    of_cache = "batch, room" if call.block_table is None else "pages, page size"
    for name, modes in (("q", "batch, tokens, heads"), ("k_cache", f"{of_cache}, 1")):
        x = getattr(call, name)
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not bfloat16 or float16")
        if x.dtype != call.q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but q has {call.q.dtype}")
        if x.dim() != 4 or x.shape[-1] != HEAD_DIM or (name == "k_cache" and x.shape[2] != 1):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be ({modes}, {HEAD_DIM})")
    check_in_place("k_cache", call.k_cache)
    if call.block_table is None and call.k_cache.shape[0] != call.q.shape[0]:
        raise ValueError(
            f"k_cache has batch size {call.k_cache.shape[0]}, but q has {call.q.shape[0]}; "
            "block_table says which pages are whose"
        )


def _check_vectors(call: MlaCall) -> None:
    batch = call.q.shape[0]
    for name in ("cache_seqlens", "block_table"):
        x = getattr(call, name)
        if x is not None and x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not int32")
    lengths, table = call.cache_seqlens, call.block_table
    assert lengths is not None, "it was checked"
    if tuple(lengths.shape) != (batch,):
        raise ValueError(f"cache_seqlens has shape {tuple(lengths.shape)}, it must be ({batch},)")
    if table is not None:
        check_table("block_table", table, batch)


def check_numbers(call: MlaCall) -> None:
    """Raise TypeError or ValueError for numbers that no kernel takes."""
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
    lengths = call.cache_seqlens
    assert lengths is not None, "it was checked"
    check_lengths(lengths, call.room)
    if call.block_table is not None:
        check_pages("block_table", call.block_table, lengths, call.k_cache)
