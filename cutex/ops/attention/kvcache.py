"""`cutex.flash_attn_with_kvcache`: attention of new queries to caches of keys and values.

Each call looks up a plan for its options that takes its tensors, and launches it; no length is read
on the host, so a CUDA graph may be replayed while lengths and pages change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.compile import Workspace
from cutex.device.row_source import ATOM_ROWS
from cutex.kernels.attention.decode.choose import CONFIGS, fitted
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.splits import Splits
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.ops.attention import scaled
from cutex.ops.attention.cache import stepped
from cutex.ops.attention.call import DTYPES, Window, kernel_dims, sides_of
from cutex.ops.attention.kvcache_call import FP8, TENSORS, KVCacheCall, check, refuse
from cutex.ops.attention.plan import arch_name, contiguous, packed, resources, why_copied
from cutex.ops.attention.rotated import rotated
from cutex.ops.device import SEVERAL_GPUS, current, launcher, on_device
from cutex.ops.plain import empty_of, untraced
from cutex.ops.plans import PlanCache
from cutex.ops.workspace import buffers_of
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.compile import Compiled

PLANS = PlanCache()


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q to the keys and values in caches, as FlashAttention's function of this name.

    q (batch, seqlen_q, heads, head dim), or with cu_seqlens_q (batch + 1,) int32 and max_seqlen_q
    packed, (total_q, heads, head dim).
    k_cache, v_cache (batch, room, heads_kv, head dim), or with a page_table (pages, page size,
    heads_kv, head dim): bfloat16 or float16 like q, read in place. Head dims as in flash_attn_func;
    heads a multiple of heads_kv.
        Or, on Hopper, float8_e4m3fn, with head dims by 16, and k_descale and v_descale (batch,
        heads_kv) float32, by which they are multiplied; q may be float8, too, times q_descale, and
        out is bfloat16 then.
    k, v (batch, new keys, heads_kv, head dim): written to the caches behind those that
    cache_seqlens counts, before attention, which sees them too. Rows beyond a cache's room are left
    out.
    cache_seqlens: (batch,) int32, or a number, the keys of each sequence; all of k_cache by
        default. Not read on the host; what lies behind in the caches may be anything.
    page_table, or block_table: (batch, pages of the longest) int32, which pages a sequence has.
    cache_batch_idx: (batch,) int32, which entry of the caches, or row of the page table, is each
        sequence's.
    cache_leftpad: (batch,) int32, the row of a cache without pages at which a sequence's keys
        begin; cache_seqlens and appended keys count from row 0.
    cu_seqlens_k_new: (batch + 1,) int32: k and v are packed, (total of new keys, heads_kv, head
        dim).
    softmax_scale, causal, window_size, softcap, learnable_sink, return_lse (or return_softmax_lse):
        as in flash_attn_func; the last query is aligned with the last key.
    rotary_cos, rotary_sin (rows, half of the rotary dim): q and k are turned by the row of their
        position, which of new key i is cache_seqlens (or rotary_seqlens) + i, and of query i the
        same with causal or a window, else cache_seqlens; rotary_interleaved: pairs are neighbours.
    num_splits: into how many parts a sequence's keys are cut, which CTAs work on at the same time;
        0 as the number of SMs and all lengths want it, 1 for results that do not depend on what
        else is in the batch.

    Returns out, like q with v's head dim, or (out, lse). Rows that see no key are 0, their lse is
    -inf or the sink's. There are no gradients. Arguments of FlashAttention's function that are not
    named here are refused where they would change the result. Raises TypeError or ValueError, with
    one sentence, for arguments that do not fit, and where there is no Hopper or Blackwell GPU. What
    the int32 tensors hold is checked on the CPU only.
    """
    if others:
        refuse("flash_attn_with_kvcache", others)
    page_table = _table(page_table, block_table)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = rows_of_table(page_table, cache_batch_idx), None
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        cache_seqlens = _all(cache_seqlens, q, cu_seqlens_q)
    if rotary_cos is not None or rotary_sin is not None:
        positions = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        by_position = causal or any(x is not None for x in sides_of(window_size))
        tables = _tables(rotary_cos, rotary_sin)
        ends = cu_seqlens_q, cu_seqlens_k_new
        q, k = rotated(q, k, tables, rotary_interleaved, positions, by_position, ends)
    if isinstance(k_cache, Tensor) and k_cache.dtype == FP8:
        q, k_descale, v_descale = scaled.prepared(
            q, k_cache, cu_seqlens_q, q_descale, k_descale, v_descale
        )
    elif q_descale is not None:
        raise ValueError("q_descale is given, but k_cache is not float8_e4m3fn")
    call = KVCacheCall(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, cache_batch_idx,
        cache_leftpad, cu_seqlens_k_new, learnable_sink, k_descale, v_descale, k, v,
        max_seqlen_q, softmax_scale, causal, window_size, softcap, num_splits,
    )  # fmt: skip
    return planned(call, return_lse or return_softmax_lse)


def _table(page_table: Tensor | None, block_table: Tensor | None) -> Tensor | None:
    """The page table, by either of its names."""
    if block_table is None:
        return page_table
    if page_table is not None:
        raise ValueError("page_table and block_table are the same argument: give one of them")
    return block_table


def rows_of_table(table: Tensor, entries: Tensor) -> Tensor:
    """The rows `entries` (batch,) of a page table."""
    for name, x, rank in (("page_table", table, 2), ("cache_batch_idx", entries, 1)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype != torch.int32 or x.dim() != rank:
            raise ValueError(
                f"{name} is {x.dtype} of {x.dim()} dimensions, it must be int32 of {rank}"
            )
    if entries.is_cpu and ((entries < 0) | (entries >= table.shape[0])).any():
        raise ValueError(
            f"cache_batch_idx must be from 0 to {table.shape[0] - 1}, got {entries.tolist()}"
        )
    return table.index_select(0, entries)


def _tables(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    return cos, sin


def planned(call: KVCacheCall, with_lse: bool) -> Any:
    """Launch the plan of a call that takes these tensors; or make one."""
    tensors = tuple(x for x in call[:TENSORS] if x is not None)
    key = (*call[TENSORS:], with_lse, *[x is None for x in call[3:TENSORS]])
    found = PLANS.launched(key, *tensors)
    return attend(call, with_lse, key) if found is None else found


def _all(length: int, q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """`length` for each sequence."""
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    return torch.full((batch,), length, dtype=torch.int32, device=q.device)


@untraced
def attend(call: KVCacheCall, with_lse: bool, key: tuple[Any, ...]) -> Any:
    """Run a call that has no plan, and keep one if later calls can have it."""
    check(call)
    check_device(call.q.device)
    if call.fp8 and arch_of(call.q.device) != "sm_90a":
        raise ValueError("k_cache is float8_e4m3fn: there is a kernel for it on Hopper only")
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors.values()):
        raise ValueError(
            "flash_attn_with_kvcache has no gradient: call it under torch.no_grad(), or use "
            "flash_attn_func"
        )
    if 0 in (*call.q.shape, call.batch, call.longest_q) or 0 in call.k_cache.shape:
        return _nothing_to_see(call, with_lse)
    with current(call.q.device):
        plan = Plan(call, with_lse)
        result = plan(*call.tensors.values())
    if plan.as_given:
        assert plan.run is not None, "it was launched"
        given = list(call.tensors.values())
        PLANS.remember(PLANS.key_of(key, *given), given, plan.run)
    return result


def _nothing_to_see(call: KVCacheCall, with_lse: bool) -> Any:
    """O and LSE where there is no query, or no cache."""
    out = call.q.new_zeros(call.out_shape)
    if not with_lse:
        return out
    lse = torch.full(call.lse_shape, -torch.inf, device=call.q.device)
    if call.learnable_sink is not None:
        lse.copy_(call.learnable_sink[:, None].expand(lse.shape))
    return out, lse


class Plan:
    """A call's kernel, and what is allocated for each launch."""

    def __init__(self, call: KVCacheCall, with_lse: bool) -> None:
        c = self.config = config_for(call, with_lse)
        self.compiled = kernel_for(c, DTYPES[call.q.dtype], arch_of(call.q.device))
        self.device, self.dtype = call.q.device, call.q.dtype
        self.shape, self.strides = call.out_shape, contiguous(call.out_shape)
        self.lse_shape, self.lse_strides = call.lse_shape, contiguous(call.lse_shape)
        tensors = call.tensors
        self.prepare: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, x in tensors.items():
            if (how := preparation(name, x)) is not None:
                self.prepare[name] = how
        self.names = tuple(tensors)
        # NOTE: of lengths on the CPU the values are checked at each call
        integers = any(x.dtype == torch.int32 for x in tensors.values())
        self.as_given = not self.prepare and not (integers and call.q.is_cpu)
        left, right = call.window
        numbers: list[float | int] = [call.scale]
        if c.softcap:
            numbers.append(float(call.softcap))
        if left is not None:
            numbers.append(-left)
        if right:
            numbers.append(right)
        if c.varlen_q:
            numbers.append(call.longest_q)
        self.numbers = (*numbers, int(call.num_splits))
        heads, heads_kv = call.heads
        units = call.batch * heads_kv * -(-call.longest_q * heads // heads_kv // c.tile_m)
        slots = Splits.slots(c.ctas, units, int(call.num_splits))
        self.needs = Workspace(slots * c.tile_m * (c.head_dim_v + 1), units)
        # of tensors that the kernel takes as they are; made at the first launch
        self.run: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """Launch on tensors like the call's."""
        given = [
            self.prepare[name](x) if name in self.prepare else x
            for name, x in zip(self.names, tensors, strict=True)
        ]
        if self.run is None:
            self.run = self._run(given)
        return self.run(*given)

    def _run(self, given: list[Tensor]) -> Callable[..., Any]:
        """A function that launches on tensors like `given` and returns the result, without
        repeating the plan's decisions."""
        buffers = buffers_of(self.needs, self.device)
        empty = empty_of(self.device, SEVERAL_GPUS)
        shape, strides, dtype, numbers = self.shape, self.strides, self.dtype, self.numbers
        lse_shape, lse_strides, of_lse = self.lse_shape, self.lse_strides, torch.float32
        with_lse = self.config.lse
        outputs = [empty(shape, strides, dtype)]
        if with_lse:
            outputs.append(empty(lse_shape, lse_strides, of_lse))
        first = [*given[:3], *outputs, *given[3:], *numbers, *buffers()]
        launch = on_device(self.device, launcher(self.compiled, first))

        @untraced
        def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Tensor) -> Any:
            out = empty(shape, strides, dtype)
            if not with_lse:
                launch(q, k_cache, v_cache, out, *rest, *numbers, *buffers())
                return out
            lse = empty(lse_shape, lse_strides, of_lse)
            launch(q, k_cache, v_cache, out, lse, *rest, *numbers, *buffers())
            return out, lse

        return run


def preparation(name: str, x: Tensor) -> Callable[[Tensor], Tensor] | None:
    """What is done to a tensor before each launch; None if the kernel takes it as it is."""
    if name in ("k_cache", "v_cache"):
        return None if stepped(x) is x else stepped
    if name in ("q", "k", "v"):
        return packed if why_copied(x, one_list=False) is not None or _is_odd(x) else None
    if name == "learnable_sink":
        as_given = x.dtype == torch.float32 and x.is_contiguous()
        return None if as_given else lambda x: x.to(torch.float32).contiguous()
    return None if x.stride(-1) == 1 else packed


def _is_odd(x: Tensor) -> bool:
    """Whether a mode of size 1 has a stride that is no multiple of 16 bytes."""
    return any(s * x.element_size() % 16 for s in x.stride()[:-1])


def config_for(call: KVCacheCall, with_lse: bool) -> DecodeConfig:
    left, right = call.window
    dims = kernel_dims(*call.head_dims)
    assert dims is not None, "check refuses other head dims"
    if call.page_size % ATOM_ROWS:
        dims = dims_of_single_rows(dims, call.k_cache.element_size())
    arch = arch_of(call.q.device)
    sms, _ = resources(call.q.device, arch)
    return fitted(
        CONFIGS[kernels_of(arch)](
            head_dim=dims[0],
            head_dim_v=dims[1],
            causal=right == 0,
            window=(left is not None, bool(right)),
            varlen_q=call.cu_seqlens_q is not None,
            used_k=call.cache_seqlens is not None,
            appended=call.k is not None and call.k.shape[-3] > 0,
            page_size=call.page_size,
            batch_idx=call.cache_batch_idx is not None,
            leftpad=call.cache_leftpad is not None,
            varlen_new=call.cu_seqlens_k_new is not None,
            fp8=call.fp8,
            softcap=call.softcap != 0,
            sink=call.learnable_sink is not None,
            lse=with_lse,
            num_sms=sms,
        )
    )


def dims_of_single_rows(dims: tuple[int, int], element: int) -> tuple[int, int]:
    """The head dims of the kernel that computes `dims` where keys are loaded row by row.

    TMA writes to multiples of 128 bytes of smem, so that rows are wholes of these.
    """
    able = [x for x in HEAD_DIMS if x[0] >= dims[0] and x[1] >= dims[1]]
    return min((x for x in able if not any(d * element % 128 for d in x)), key=sum)


@lru_cache(maxsize=1024)
def kernel_for(config: DecodeConfig, dtype: str, arch: str) -> Compiled:
    from cutex.compile import compile

    Decode = import_module(f"{package('attention_decode', arch)}.decode").Decode

    return compile(Decode(config), dtype, arch)


def arch_of(device: torch.device) -> str:
    """The arch of a device that `check_device` accepts; else the first that has kernels."""
    name = arch_name(device)
    return name if name is not None and kernels_of(name) in CONFIGS else next(iter(CONFIGS))


def check_device(device: torch.device) -> None:
    """Raise ValueError, in one sentence, if there is no kernel for the device."""
    name = arch_name(device)
    if name is None or kernels_of(name) not in CONFIGS:
        where = f"{device}" if name is None else f"{device}, of arch {name}"
        raise ValueError(
            f"q is on {where}: flash_attn_with_kvcache has kernels for {', '.join(CONFIGS)}; move "
            "its tensors there, or run them in the simulator with "
            '`with cutex.ops.simulated("sm_90a"):`'
        )
