"""The arguments of one flash_attn_with_kvcache call, and the checks that they must pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutex.ops.attention.cache import (
    MOST_SPLITS,
    check_in_place,
    check_lengths,
    check_pages,
    check_table,
    check_tensors,
    room_of,
)
from cutex.ops.attention.call import DTYPES, INTEGERS, SINK_DTYPES, Window, kernel_dims, sides_of
from cutex.ops.attention.flash_arguments import one_of
from cutex.ops.number import check_flag, number
from cutex.ops.overlap import share_memory
from cutex.ops.plain import is_plain
from cutex.ops.written import check_writable

FP8 = torch.float8_e4m3fn


class Refused(NamedTuple):
    """The values of an argument that change nothing, and why others are refused."""

    values: tuple[Any, ...]
    why: str


REFUSED = {
    "qv": Refused((None,), "there is no second product with v"),
    "leftpad_k": Refused((None,), "it is called cache_leftpad here"),
    "attention_chunk": Refused((0, None), "there are no chunks here"),
    "alibi_slopes": Refused((None,), "there is no bias here"),
    "scheduler_metadata": Refused((None,), "keys are split while the kernel runs"),
    "pack_gqa": Refused((None, True, False), ""),
    "sm_margin": Refused((0, None), "the kernel takes all SMs"),
}


TENSORS = 14  # of the fields of a KVCacheCall, the first


class KVCacheCall(NamedTuple):
    """The arguments of flash_attn_with_kvcache: tensors, in the order of a plan's launch, and
    numbers."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cu_seqlens_q: Tensor | None
    cache_seqlens: Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    cu_seqlens_k_new: Tensor | None
    learnable_sink: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    k: Tensor | None
    v: Tensor | None
    max_seqlen_q: int | None
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    num_splits: int

    @property
    def fp8(self) -> bool:
        """Whether the caches hold e4m3."""
        return self.k_cache.dtype == FP8

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, in the order of a plan's launch."""
        given = zip(self._fields[:TENSORS], self[:TENSORS], strict=True)
        return {name: x for name, x in given if x is not None}

    @property
    def batch(self) -> int:
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        return self.q.shape[0]

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[-2], self.k_cache.shape[-2]

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.q.shape[-1], self.v_cache.shape[-1]

    @property
    def page_size(self) -> int:
        return 0 if self.page_table is None else self.k_cache.shape[1]

    @property
    def room(self) -> int:
        """The keys that a sequence has room for."""
        return room_of(self.k_cache, self.page_table)

    @property
    def new_keys(self) -> int | Tensor:
        """The new keys of each sequence: a number, or (batch,)."""
        if self.cu_seqlens_k_new is not None:
            return self.cu_seqlens_k_new.diff()
        return 0 if self.k is None else self.k.shape[1]

    @property
    def longest_q(self) -> int:
        """The largest number of queries that a sequence can have."""
        rows = self.q.shape[-3]
        if self.cu_seqlens_q is None or self.max_seqlen_q is None:
            return rows
        return min(int(self.max_seqlen_q), rows)

    @property
    def rows(self) -> int:
        """The packed rows, of all query heads of a head of K and V, that a sequence can have."""
        return self.longest_q * self.heads[0] // self.heads[1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v_cache.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        *batch, rows, heads, _ = self.q.shape
        return (*batch, heads, rows)

    @property
    def scale(self) -> float:
        scale = self.softmax_scale
        return float(self.q.shape[-1] ** -0.5 if scale is None else scale)

    def window(self, room: int) -> Window:
        """The window without bounds that have no effect where sequences have room for `room` keys;
        its right side is 0 if causal."""
        left, right = sides_of(self.window_size)
        right = 0 if self.causal else right
        if right is not None and right >= self.longest_q - 1:
            right = None
        if left is not None and left >= room - 1:
            left = None
        return left, right

    def traits(self, room: int, with_lse: bool) -> dict[str, Any]:
        """The fields of any kernel's config that a call determines, if sequences have room for
        `room` keys."""
        left, right = self.window(room)
        return {
            "causal": right == 0,
            "window": (left is not None, bool(right)),
            "varlen_q": self.cu_seqlens_q is not None,
            "used_k": self.cache_seqlens is not None,
            "softcap": self.softcap != 0,
            "sink": self.learnable_sink is not None,
            "lse": with_lse,
            "page_size": self.page_size,
        }


def other_sink(others: dict[str, Any], sink: Tensor | None) -> Tensor | None:
    """The sink, by its name here or vLLM's, s_aux. Raises TypeError or ValueError, in one sentence,
    for any other argument of FlashAttention's function that would change the result, or that it
    does not have."""
    for name, value in others.items():
        known = REFUSED.get(name)
        if name == "s_aux":
            sink = one_of("learnable_sink", sink, name, value)
        elif known is None:
            raise TypeError(
                f"flash_attn_with_kvcache() got an unexpected keyword argument {name!r}"
            )
        elif isinstance(value, Tensor) or value not in known.values:
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} is {shown}: {known.why}")
    return sink


def table_of(
    page_table: Tensor | None, block_table: Tensor | None, entries: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The page table, by either of its names, with rows selected by cache_batch_idx; without pages,
    cache_batch_idx itself."""
    page_table = one_of("page_table", page_table, "block_table", block_table)
    if page_table is None or entries is None:
        return page_table, entries
    for name, x, rank in (("page_table", page_table, 2), ("cache_batch_idx", entries, 1)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype != torch.int32 or x.dim() != rank:
            raise ValueError(
                f"{name} is {x.dtype} of {x.dim()} dimensions, it must be int32 of {rank}"
            )
    if entries.is_cpu and ((entries < 0) | (entries >= page_table.shape[0])).any():
        raise ValueError(
            f"cache_batch_idx must be from 0 to {page_table.shape[0] - 1}, got {entries.tolist()}"
        )
    return page_table.index_select(0, entries), None


def lengths_of(
    length: int,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    cache: tuple[Tensor, Tensor | None],
    new: Tensor | None,
) -> Tensor:
    """`length` for each sequence. Raises TypeError, in one sentence, for what is no tensor, and
    ValueError if a cache (and its page table) has no room for so many and the `new` keys of each,
    where shapes are what they should be."""
    k_cache, page_table = cache
    given: list[tuple[str, object]] = [("q", q), ("k_cache", k_cache)]
    given += [] if cu_seqlens_q is None else [("cu_seqlens_q", cu_seqlens_q)]
    check_tensors(given)
    if k_cache.dim() > 1 and (
        page_table is None or (isinstance(page_table, Tensor) and page_table.dim() > 1)
    ):
        room = room_of(*cache)
        more = new.shape[1] if isinstance(new, Tensor) and new.dim() == 4 else 0
        if length + more > room:
            with_new = f" with {more} new keys" if more else ""
            raise ValueError(
                f"cache_seqlens must be from 0 to the {room} keys that there is room for"
                f"{with_new}, got {length}"
            )
    ends = q if cu_seqlens_q is None else cu_seqlens_q
    rows = ends.shape[0] if ends.dim() else 0  # what has none is refused by its name
    batch = rows if cu_seqlens_q is None else max(rows - 1, 0)
    return torch.full((batch,), length, dtype=torch.int32, device=q.device)


def check(call: KVCacheCall) -> None:
    """Raise TypeError or ValueError, in one sentence that names the argument, for a call that is
    not supported."""
    names = "q", "k_cache", "v_cache", *call.tensors
    check_tensors((name, getattr(call, name)) for name in names)
    _check_operands(call)
    _check_caches(call)
    _check_new(call)
    _check_vectors(call)
    _check_scales(call)
    _check_numbers(call)
    if call.q.device.type == "cpu" and all(map(is_plain, call.tensors.values())):
        _check_values(call)


def check_shapes(call: KVCacheCall) -> None:
    """Raise as `check`, for what shapes, dtypes and numbers of a call say: of tensors without
    memory, as a compiler has them."""
    _check_operands(call)
    _check_batch(call)
    _check_vectors(call)
    _check_scales(call)
    _check_numbers(call)


def _check_operands(call: KVCacheCall) -> None:
    packed = call.cu_seqlens_q is not None
    for name, rank in (("q", 3 if packed else 4), ("k_cache", 4), ("v_cache", 4)):
        x = getattr(call, name)
        fp8 = name != "q" and x.dtype == FP8
        if x.dtype not in DTYPES and not fp8:
            other = "" if name == "q" else ", nor float8_e4m3fn"
            raise TypeError(f"{name} has dtype {x.dtype}, which is not bfloat16 or float16{other}")
        if x.dtype != call.q.dtype and not fp8:
            raise TypeError(f"{name} has dtype {x.dtype}, but q has {call.q.dtype}")
        if x.dim() != rank:
            modes = "total, heads, head dim" if rank == 3 else "batch, seqlen, heads, head dim"
            if name != "q" and call.page_table is not None:
                modes = "pages, page size, heads, head dim"
            raise ValueError(f"{name} has {x.dim()} dimensions, it must have {rank}: ({modes})")
    if (ends := call.cu_seqlens_q) is not None and ends.dim() != 1:
        raise ValueError(f"cu_seqlens_q has shape {tuple(ends.shape)}, it must be (batch + 1,)")
    if kernel_dims(*call.head_dims) is None:
        d, dv = call.head_dims
        raise ValueError(
            f"q and v_cache have head dims {d} and {dv}, each must be a multiple of 8 up to 256"
        )
    if call.v_cache.dtype != call.k_cache.dtype:
        raise TypeError(
            f"v_cache has dtype {call.v_cache.dtype}, but k_cache has {call.k_cache.dtype}"
        )
    if call.fp8 and any(x % 16 for x in call.head_dims):
        raise ValueError(f"caches of float8 have head dims by 16, got {call.head_dims}")
    if call.k_cache.shape[-1] != call.q.shape[-1]:
        raise ValueError(
            f"k_cache has head dim {call.k_cache.shape[-1]}, but q has {call.q.shape[-1]}"
        )
    if call.v_cache.shape[:-1] != call.k_cache.shape[:-1]:
        raise ValueError(
            f"v_cache has shape {tuple(call.v_cache.shape)}, but k_cache has "
            f"{tuple(call.k_cache.shape)}: all but the last must agree"
        )
    heads_q, heads_kv = call.heads
    if heads_kv == 0 or heads_q == 0 or heads_q % heads_kv:
        raise ValueError(
            f"q has {heads_q} heads, which is no multiple of the {heads_kv} of k_cache"
        )


def _check_caches(call: KVCacheCall) -> None:
    """The caches are never copied, so TMA must be able to step through them."""
    check_in_place("k_cache", call.k_cache)
    check_in_place("v_cache", call.v_cache)
    _check_batch(call)


def _check_batch(call: KVCacheCall) -> None:
    whole = call.page_table is None and call.cache_batch_idx is None
    if whole and call.k_cache.shape[0] != call.batch:
        raise ValueError(
            f"k_cache has batch size {call.k_cache.shape[0]}, but q has {call.batch}; "
            "cache_batch_idx says which of them are meant"
        )


def _check_new(call: KVCacheCall) -> None:
    if (call.k is None) != (call.v is None):
        raise ValueError("k and v must be given together, or neither")
    if call.k is None or call.v is None:
        if call.cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new is given, but no k and v, whose ends it has")
        return
    if call.q.shape[1:2] == (0,):
        raise ValueError("q has no rows: k and v are appended only where there are queries")
    if call.cache_seqlens is None:
        raise ValueError(
            "cache_seqlens must be given with k and v: it says where they are appended"
        )
    check_writable("k_cache", call.k_cache)
    check_writable("v_cache", call.v_cache)
    if share_memory(call.k_cache, call.v_cache):
        raise ValueError("k_cache and v_cache share memory: k and v cannot be appended to both")
    caches = call.k_cache, call.v_cache
    for name in ("q", "k", "v"):
        if any(share_memory(getattr(call, name), cache) for cache in caches):
            raise ValueError(
                f"{name} shares memory with a cache, to which k and v are appended: clone it first"
            )
    packed = call.cu_seqlens_k_new is not None
    modes = "total of new keys" if packed else "batch, new keys"
    for name, x, cache in (("k", call.k, call.k_cache), ("v", call.v, call.v_cache)):
        if x.dtype != cache.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but {name}_cache has {cache.dtype}")
        rows = call.k.shape[-3] if call.k.dim() >= 3 else 0
        expected = (*(() if packed else (call.batch,)), rows, *cache.shape[2:])
        if tuple(x.shape) != expected:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, it must be ({modes}, heads, head dim), here "
                f"{expected}"
            )


def _check_vectors(call: KVCacheCall) -> None:
    each = "cache_seqlens", "cache_batch_idx", "cache_leftpad"
    shapes = {**dict.fromkeys(each, (call.batch,)), "cu_seqlens_k_new": (call.batch + 1,)}
    for name in (*shapes, "cu_seqlens_q", "page_table"):
        x = getattr(call, name)
        if x is None:
            continue
        if x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not int32")
        if name in shapes and tuple(x.shape) != shapes[name]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be {shapes[name]}")
        if name == "cu_seqlens_q" and (x.dim() != 1 or x.shape[0] < 1):
            raise ValueError(f"cu_seqlens_q has shape {tuple(x.shape)}, it must be (batch + 1,)")
        if name == "page_table":
            check_table(name, x, call.batch)
    if call.page_table is not None and call.cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with page_table: pages may be in part unused")
    sink = call.learnable_sink
    if sink is not None and (sink.dtype not in SINK_DTYPES or tuple(sink.shape) != call.heads[:1]):
        raise ValueError(
            f"learnable_sink is {sink.dtype} {tuple(sink.shape)}: it must be float32, bfloat16 or "
            f"float16, one number for each of the {call.heads[0]} heads of q"
        )


def _check_scales(call: KVCacheCall) -> None:
    for name in ("k_descale", "v_descale"):
        x = getattr(call, name)
        if x is None:
            continue
        if not call.fp8:
            raise ValueError(f"{name} is given, but k_cache has dtype {call.k_cache.dtype}")
        shape = call.batch, call.heads[1]
        if x.dtype != torch.float32 or tuple(x.shape) != shape:
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, it must be float32 {shape}")


def _check_numbers(call: KVCacheCall) -> None:
    window = call.window_size
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window!r}")
    for bound in window:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, INTEGERS)):
            raise TypeError(f"window_size={tuple(window)}: a side is a whole number or None")
    if any(x is not None and x < 0 for x in sides_of(window)):
        raise ValueError(
            f"window_size={tuple(window)}: a band off the diagonal, for which flash_attn_func has "
            "a kernel, but caches have none"
        )
    check_flag("causal", call.causal)
    for name in ("softcap", "softmax_scale"):
        x = getattr(call, name)
        if isinstance(x, bool) or (x is None and name == "softcap"):
            raise TypeError(f"{name} must be a number, got {x}")
        if x is not None and not abs(number(name, x)) < 3e38:
            raise ValueError(f"{name}={x}: must be finite")
    if call.softmax_scale is not None and not call.softmax_scale > 0:
        raise ValueError(f"softmax_scale={call.softmax_scale}: must be positive")
    if call.softcap < 0:
        raise ValueError(f"softcap={call.softcap}: must be positive, or 0 for none")
    for name, least, most in (("num_splits", 0, MOST_SPLITS), ("max_seqlen_q", 0, 2**31 - 1)):
        x = getattr(call, name)
        if x is None and name == "max_seqlen_q":
            continue
        if isinstance(x, bool) or not isinstance(x, INTEGERS):
            raise TypeError(f"{name} must be an int, got {type(x).__name__}")
        if not least <= x <= most:
            raise ValueError(f"{name}={x}: must be from {least} to {most}")


def _check_new_ends(call: KVCacheCall) -> None:
    ends, k = call.cu_seqlens_k_new, call.k
    if ends is None or k is None:
        return
    if ends[0] != 0 or (ends.diff() < 0).any() or ends[-1] > k.shape[0]:
        raise ValueError(
            f"cu_seqlens_k_new must rise from 0 to at most the {k.shape[0]} rows of k, got "
            f"{ends.tolist()}"
        )


def _check_leftpad(call: KVCacheCall, keys: Tensor) -> None:
    pad = call.cache_leftpad
    if pad is not None and ((pad < 0) | (pad > keys)).any():
        raise ValueError(
            f"cache_leftpad must be from 0 to the keys that a sequence has, {keys.tolist()}, got "
            f"{pad.tolist()}"
        )


def _check_values(call: KVCacheCall) -> None:
    """Check what the int32 tensors hold, on the CPU only: on a GPU that would have to wait for
    it."""
    lengths = call.cache_seqlens
    if lengths is not None:
        _check_new_ends(call)
        check_lengths(lengths, call.room, call.new_keys)
        _check_leftpad(call, lengths + call.new_keys)
    entries = call.cache_batch_idx
    if entries is not None:
        outside = (entries < 0) | (entries >= call.k_cache.shape[0])
        if outside.any():
            raise ValueError(
                f"cache_batch_idx must be from 0 to {call.k_cache.shape[0] - 1}, got "
                f"{entries.tolist()}"
            )
        if call.k is not None and len(entries.unique()) < len(entries):
            raise ValueError(
                f"cache_batch_idx has an entry twice, {entries.tolist()}: k and v of two sequences "
                "cannot be appended to it"
            )
    if call.page_table is not None and lengths is not None:
        check_pages(
            "page_table", call.page_table, lengths, call.k_cache, call.new_keys, call.cache_leftpad
        )
    ends = call.cu_seqlens_q
    if ends is not None:
        rows, longest = call.q.shape[0], call.longest_q
        counts = ends.diff()
        if ends[0] != 0 or (counts < 0).any() or ends[-1] > rows or (counts > longest).any():
            raise ValueError(
                f"cu_seqlens_q must rise from 0 to at most the {rows} rows of q, by at most "
                f"{longest}, got {ends.tolist()}"
            )
