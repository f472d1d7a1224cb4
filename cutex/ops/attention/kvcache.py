"""`cutex.flash_attn_with_kvcache`: attention of new queries to caches of keys and values.

Each call looks up a plan for its options that takes its tensors, and launches it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.compile import Workspace
from cutex.device.row_source import ATOM_ROWS
from cutex.kernels.attention.decode.choose import CONFIGS, comes_in_waves, fitted, is_crowded
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.splits import Splits, are_many
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.ops.attention import cache_operators, prefill, scaled
from cutex.ops.attention.cache_plan import CacheOperator, Plan, of_parts, preparations
from cutex.ops.attention.call import DTYPES, Window, kernel_dims, pair_of, sides_of
from cutex.ops.attention.kvcache_call import (
    FP8,
    TENSORS,
    KVCacheCall,
    check,
    lengths_of,
    other_sink,
    table_of,
)
from cutex.ops.attention.plan import kernel_for as forward_kernel_for
from cutex.ops.attention.plan import resources
from cutex.ops.attention.rotated import rotated
from cutex.ops.device import current
from cutex.ops.number import check_flag
from cutex.ops.plain import untraced
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.compile import Compiled

# rows of parts that the last CTA merges, at most (docs/facts/decode.md#combine)
MOST_MERGED = 64
# new rows of a sequence that the warps that load append (docs/facts/decode.md#appended-inside)
MOST_APPENDED = 16
FEW_SEQUENCES = 2  # of e4m3 (docs/facts/decode.md#e4m3-shares)
LANES = 32  # of a warp
IDLE = 32  # of so many teams one may have no part of a lone sequence (docs/facts/decode.md#lone)
# bits of a plan's key: which of the tensors that may be left out are given, in a launch's order
CU_Q, ENDS, TABLE, ENTRIES, BEGINS, CU_NEW, SINK, K_SCALE, V_SCALE, NEW_K, NEW_V = (
    1 << bit for bit in range(TENSORS - 3)
)
OPERATOR = CacheOperator("flash_attn_with_kvcache", CONFIGS)
PLANS = OPERATOR.plans
_is_compiling = torch.compiler.is_dynamo_compiling


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
    """Attention of q to cached keys and values, like FlashAttention's function of this name.

    q: (batch, seqlen_q, heads, head dim); or packed, (total_q, heads, head dim), with cu_seqlens_q
        (batch + 1,) int32 and max_seqlen_q.
    k_cache, v_cache: (batch, room, heads_kv, head dim), or with a page_table (pages, page size,
        heads_kv, head dim); bfloat16 or float16 like q, read in place. heads is a multiple of
        heads_kv; head dims as in flash_attn_func.
        On Hopper also float8_e4m3fn, with head dims that are multiples of 16, times k_descale and
        v_descale (batch, heads_kv) float32. q may then be float8, too, times q_descale; out is
        bfloat16 in that case.
    k, v: (batch, new keys, heads_kv, head dim), appended to the caches after the cache_seqlens
        existing ones, before attention, which sees them. Rows that a cache has no room for are
        dropped. With cu_seqlens_k_new (batch + 1,) int32 they are packed, (total of new keys,
        heads_kv, head dim). Appended float8 values saturate.
    cache_seqlens: (batch,) int32, or a number: the keys of each sequence, by default all of
        k_cache. Not read on the host. Cache contents past them may be anything.
    page_table (or block_table): (batch, pages of the longest sequence) int32, the pages of each
        sequence.
    cache_batch_idx: (batch,) int32, the entry of the caches, or row of the page table, that belongs
        to each sequence.
    cache_leftpad: (batch,) int32, the row of a sequence's cache or pages at which its keys start;
        cache_seqlens and appended keys count from row 0. Keys in pages are then loaded row by row.
    softmax_scale, causal, window_size, softcap, learnable_sink, return_lse (or return_softmax_lse):
        as in flash_attn_func; the last query is aligned with the last key.
    rotary_cos, rotary_sin: (rows, half of the rotary dim). q and the new k are rotated by the row
        of their position: cache_seqlens (or rotary_seqlens) + i for new key i; for query i the same
        with causal or a window, otherwise cache_seqlens. rotary_interleaved: pairs are neighbours.
    num_splits: the number of parts that each sequence's keys are divided into, which CTAs process
        in parallel. 0 chooses by the number of SMs and all lengths; with 1 a result does not depend
        on what else is in the batch.

    Returns out, like q with v's head dim, or (out, lse). Rows that see no key are 0, with an lse of
    -inf or of their sink. There are no gradients.

    Raises TypeError or ValueError, in one sentence, for arguments that are not supported (also
    those of FlashAttention's function not named here, where they would change the result), and
    without a Hopper or Blackwell GPU. The values of int32 tensors are checked only on the CPU.
    """
    with_lse = return_lse or return_softmax_lse
    if window_size.__class__ is not tuple:
        window_size = pair_of(window_size)
    if _is_compiling():
        return cache_operators.attend(
            (q, k_cache, v_cache, k, v), window_size, others, cache_seqlens=cache_seqlens,
            page_table=page_table, block_table=block_table, cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
            softmax_scale=softmax_scale, causal=causal, softcap=softcap,
            learnable_sink=learnable_sink, num_splits=num_splits, return_lse=with_lse,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
            rotary_seqlens=rotary_seqlens,
        )  # fmt: skip
    # NOTE: only what a plan's key takes is asked here, and without a loop, which would take as long
    # as the guard; a length that is a number, a list and scales left out have no plan
    if (
        not others
        and block_table is None
        and q_descale is None
        and rotary_cos is None
        and rotary_sin is None
        and (cache_batch_idx is None or page_table is None)
    ):
        given, which = [q, k_cache, v_cache], 0
        if cu_seqlens_q is not None:
            given.append(cu_seqlens_q)
            which += CU_Q
        if cache_seqlens is not None:
            given.append(cache_seqlens)
            which += ENDS
        if page_table is not None:
            given.append(page_table)
            which += TABLE
        if cache_batch_idx is not None:
            given.append(cache_batch_idx)
            which += ENTRIES
        if cache_leftpad is not None:
            given.append(cache_leftpad)
            which += BEGINS
        if cu_seqlens_k_new is not None:
            given.append(cu_seqlens_k_new)
            which += CU_NEW
        if learnable_sink is not None:
            given.append(learnable_sink)
            which += SINK
        if k_descale is not None:
            given.append(k_descale)
            which += K_SCALE
        if v_descale is not None:
            given.append(v_descale)
            which += V_SCALE
        if k is not None:
            given.append(k)
            which += NEW_K
        if v is not None:
            given.append(v)
            which += NEW_V
        key = (
            max_seqlen_q, softmax_scale, causal, window_size, softcap, num_splits, with_lse, which
        )  # fmt: skip
        found = PLANS.launched(key, *given)
        if found is not None:
            return found
    if others:
        learnable_sink = other_sink(others, learnable_sink)
    call = KVCacheCall(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, cache_batch_idx,
        cache_leftpad, cu_seqlens_k_new, learnable_sink, k_descale, v_descale, k, v, max_seqlen_q,
        softmax_scale, causal, window_size, softcap, num_splits,
    )  # fmt: skip
    rotary = rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens
    return _run(_prepared(call, block_table, q_descale, rotary), with_lse)


def _prepared(
    call: KVCacheCall, block_table: Tensor | None, q_descale: Tensor | None, rotary: tuple[Any, ...]
) -> KVCacheCall:
    """A call as the kernels have it: lengths that are a tensor, pages by one name, scales of K and
    V, queries and new keys that are turned."""
    q, k_cache, k, ends = call.q, call.k_cache, call.k, call.cache_seqlens
    page_table, entries = call.page_table, call.cache_batch_idx
    k_scale, v_scale, window = call.k_descale, call.v_descale, call.window_size
    if block_table is not None or entries is not None:
        page_table, entries = table_of(page_table, block_table, entries)
    if isinstance(ends, int) and not isinstance(ends, bool):
        if not 0 <= ends < 1 << 31:
            raise ValueError(f"cache_seqlens={ends}: it must be from 0 to 2^31 - 1")
        ends = lengths_of(ends, q, call.cu_seqlens_q, (k_cache, page_table), k)
    if q_descale is not None or (
        (k_scale is None or v_scale is None or getattr(q, "dtype", None) is FP8)
        and getattr(k_cache, "dtype", None) is FP8
    ):
        scales = q_descale, k_scale, v_scale
        q, k_scale, v_scale = scaled.prepared(q, k_cache, call.cu_seqlens_q, *scales)
    cos, sin, interleaved, positions = rotary
    if cos is not None or sin is not None:
        positions = ends if positions is None else positions
        by_position = call.causal or any(x is not None for x in sides_of(window))
        of_packed = call.cu_seqlens_q, call.cu_seqlens_k_new
        q, k = rotated(q, k, (cos, sin), interleaved, positions, by_position, of_packed)
    return call._replace(
        q=q, k=k, cache_seqlens=ends, page_table=page_table, cache_batch_idx=entries,
        k_descale=k_scale, v_descale=v_scale)  # fmt: skip


def _run(call: KVCacheCall, with_lse: bool) -> Any:
    """What a prepared call returns."""
    given = [x for x in call[:TENSORS] if x is not None]
    which = sum(1 << bit for bit, x in enumerate(call[3:TENSORS]) if x is not None)
    key = *call[TENSORS:], with_lse, which
    found = PLANS.launched(key, *given)
    return attend(call, with_lse, key) if found is None else found


def known_token(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ends: Tensor | None,
    begins: Tensor | None,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    learnable_sink: Tensor | None,
    return_lse: bool = False,
) -> Any:
    """The result of flash_attn_with_kvcache with cache_seqlens `ends` and cache_leftpad `begins`,
    if it has a plan for these arguments, otherwise None; faster than deciding whether it may be
    called."""
    given, which = [q, k_cache, v_cache], 0
    if ends is not None:
        given.append(ends)
        which = ENDS
    if begins is not None:
        given.append(begins)
        which += BEGINS
    if learnable_sink is not None:
        given.append(learnable_sink)
        which += SINK
    key = None, softmax_scale, causal, window_size, softcap, 0, return_lse, which
    return PLANS.launched(key, *given)


@untraced
def attend(call: KVCacheCall, with_lse: bool, key: tuple[Any, ...]) -> Any:
    """Run a call that has no plan, and keep one if later calls can have it."""
    check_flag("return_lse", with_lse)
    check(call)
    OPERATOR.check_device(call.q.device)
    if call.fp8 and OPERATOR.arch_of(call.q.device) != "sm_90a":
        raise ValueError("k_cache is float8_e4m3fn: there is a kernel for it on Hopper only")
    OPERATOR.check_no_gradient(call)
    if 0 in (*call.q.shape, call.batch, call.longest_q) or 0 in call.k_cache.shape:
        return _nothing_to_see(call, with_lse)
    with current(call.q.device):
        plan = plan_of(call, with_lse)
    # NOTE: a cache that grows, as transformers' dynamic one, is another tensor for each token
    others = PLANS.key_of(key, *call.tensors.values()) in PLANS.known
    return OPERATOR.run(plan, call.tensors, key, alike_rooms(call, with_lse) if others else None)


def alike_rooms(call: KVCacheCall, with_lse: bool) -> range | None:
    """The other rooms (numbers of keys that caches have room for) that the plan of `call` could
    serve; None if pages, or a tensor given twice, exclude any."""
    tensors = list(call.tensors.values())
    if prefill.is_of_many_queries(call, OPERATOR.arch_of(call.q.device)):
        return None
    if call.page_table is not None or len({id(x) for x in tensors}) < len(tensors):
        return None
    config = config_for(call, with_lse)
    # NOTE: what is chosen by the room changes at some rooms, and is the same between two that agree
    most = 1 << (call.room - 1).bit_length()
    while most > call.room and config_for(call, with_lse, most) != config:
        most = (most + call.room) // 2
    least = most // 2 + 1
    alike = least < call.room and config_for(call, with_lse, least) == config
    return range(least if alike else call.room, most + 1)


def _nothing_to_see(call: KVCacheCall, with_lse: bool) -> Any:
    """O and LSE where there is no query, or no cache."""
    out = call.q.new_zeros(call.out_shape)
    if not with_lse:
        return out
    lse = torch.full(call.lse_shape, -torch.inf, dtype=torch.float32, device=call.q.device)
    if call.learnable_sink is not None:
        lse.copy_(call.learnable_sink[:, None].expand(lse.shape))
    return out, lse


def plan_of(call: KVCacheCall, with_lse: bool) -> Plan:
    arch = OPERATOR.arch_of(call.q.device)
    if prefill.is_of_many_queries(call, arch):
        return prefill_plan(call, with_lse, arch)
    c = config_for(call, with_lse)
    parts = parts_by_room(call, c, call.room) if c.by_room else int(call.num_splits)
    numbers, units = (*numbers_of(call), parts), units_of(call, c)
    needs = Workspace(1, 1)  # of whole units, which have no parts there
    if not c.whole:
        needs = of_parts(c, units, int(call.num_splits), units)
    compiled = kernel_for(c, DTYPES[call.q.dtype], arch)
    prepare = preparations(call.tensors)
    return Plan(call, compiled, 3, with_lse, numbers, needs, prepare, untouched=c.whole)


def prefill_plan(call: KVCacheCall, with_lse: bool, arch: str) -> Plan:
    """The plan of a call of many queries."""
    c = prefill.config_for(call, with_lse, arch)
    compiled = forward_kernel_for(c, DTYPES[call.q.dtype], arch)
    needs, prepare = c.workspace(prefill.shape_of(call)), preparations(call.tensors)
    return Plan(call, compiled, 3, with_lse, numbers_of(call), needs, prepare, words_first=True)


def numbers_of(call: KVCacheCall) -> tuple[float | int, ...]:
    """The numbers passed to a kernel, out of the call's."""
    left, right = call.window(call.room)
    numbers: list[float | int] = [call.scale]
    if call.softcap:
        numbers.append(float(call.softcap))
    if left is not None:
        numbers.append(-left)
    if right:
        numbers.append(right)
    if call.cu_seqlens_q is not None:
        numbers.append(call.longest_q)
    return tuple(numbers)


def config_for(call: KVCacheCall, with_lse: bool, room: int | None = None) -> DecodeConfig:
    """The config of a call; `room`: as if its caches had room for this many keys."""
    room = call.room if room is None else room
    dims = kernel_dims(*call.head_dims)
    assert dims is not None, "check refuses other head dims"
    if call.page_size and (call.page_size % ATOM_ROWS or call.cache_leftpad is not None):
        dims = dims_of_single_rows(dims, call.k_cache.element_size())
    arch = OPERATOR.arch_of(call.q.device)
    sms, _ = resources(call.q.device, arch)
    kind = CONFIGS[kernels_of(arch)]
    config = kind(
        head_dim=dims[0],
        head_dim_v=dims[1],
        **call.traits(room, with_lse),
        appended=call.k is not None and call.k.shape[-3] > 0,
        batch_idx=call.cache_batch_idx is not None,
        leftpad=call.cache_leftpad is not None,
        varlen_new=call.cu_seqlens_k_new is not None,
        fp8=call.fp8,
        one_block=call.rows <= kind.tile_m,
        num_sms=sms,
    )
    # NOTE: with num_splits results must not depend on how many units there are
    units = 0 if call.num_splits else units_of(call, config)
    config = fitted(config, room, units, call.rows)
    parts = parts_by_room(call, config, room)
    crowded = config.few_rows and parts == 1 and is_crowded(units_of(call, config), config)
    overlaps = config.overlaps and not crowded
    waves = parts == 1 and comes_in_waves(config, units)
    config = replace(config, by_room=parts > 0, whole=parts == 1, overlaps=overlaps, waves=waves)
    config = replace(config, combined=is_combined(call, config, room))
    if not (config.by_room or call.num_splits):
        alone = units_of(call, config) <= config.ctas
        few = config.one_block and call.batch <= LANES
        config = replace(config, in_shares=True, few_entries=few, alone=alone)
    return replace(config, appends=is_appending(call, config))


def parts_by_room(call: KVCacheCall, config: DecodeConfig, room: int) -> int:
    """The number of parts that each unit is cut into by its room, so that a CTA needs no lengths
    but its own units'; 0 if units are cut by all lengths, or by num_splits."""
    blocks = -(-room // config.tile_n)
    if call.num_splits > 1:
        return 0
    # NOTE: two CTAs of an SM that have few rows, or head dim 256, need not both have a unit
    ctas = config.num_sms if config.few_rows or config.q_in_smem else config.ctas
    many = not call.num_splits and are_many(units_of(call, config), ctas)
    if config.is_whole(blocks + config.start) or (many and blocks <= config.most_whole):
        return 1
    if call.num_splits or not config.one_block:
        return 0
    owners = call.heads[1]
    team = Splits.team_of(owners, config.team)
    teams, units = config.ctas // team, call.batch * owners // team
    if units > teams:
        return 0
    parts = min(teams // units, -(-blocks // config.least))
    size = -(-blocks // parts)
    # NOTE: of so few sequences lengths differ less than it takes roles to share them out
    few = config.widens and call.batch <= FEW_SEQUENCES
    # NOTE: a lone sequence has as many parts, whatever its length
    lone = call.batch == 1 and config.few_rows and config.head_dims == (128, 128)
    lone = lone and not (config.page_size or config.fp8) and IDLE * (teams % units) <= teams
    if not (few or lone or config.is_short(size)):
        return 0
    return 1 if blocks <= size + config.merge else -(-blocks // size)


def is_combined(call: KVCacheCall, config: DecodeConfig, room: int) -> bool:
    """Whether a separate kernel merges parts: where a unit's last CTA would have so many rows to
    merge that it takes longer than that kernel's start (if units are alike); never where no unit is
    cut. Always with num_splits, since results must not depend on the number of units."""
    if call.num_splits:
        return call.num_splits > 1
    if config.whole:
        return False
    blocks = -(-room // config.tile_n)
    units = units_of(call, config)
    if config.by_room:
        parts = parts_by_room(call, config, room)
    elif units > config.ctas:
        parts = 2  # of those in which shares end
    elif 3 * units >= 2 * config.num_sms:
        parts = 1  # so many stay whole, if they are alike (DecodeConfig.are_whole_alone)
    else:
        parts = min(-(-config.num_sms // units), blocks)
    return min(call.rows, config.tile_m) * parts > MOST_MERGED


def is_appending(call: KVCacheCall, config: DecodeConfig) -> bool:
    """Whether the load warps append k and v, instead of a separate launch before."""
    if not config.appended or call.k is None or call.k.shape[-3] > MOST_APPENDED:
        return False
    return replace(config, appends=True).why_not_appending() is None


def units_of(call: KVCacheCall, config: DecodeConfig) -> int:
    """The blocks of packed rows of all sequences, if each is the longest, and heads."""
    return call.batch * call.heads[1] * -(-call.rows // config.tile_m)


def dims_of_single_rows(dims: tuple[int, int], element: int) -> tuple[int, int]:
    """The head dims of the kernel that computes `dims` if keys are loaded row by row.

    TMA writes to multiples of 128 bytes of smem, so rows are whole multiples of that.
    """
    able = [x for x in HEAD_DIMS if x[0] >= dims[0] and x[1] >= dims[1]]
    return min((x for x in able if not any(d * element % 128 for d in x)), key=sum)


@lru_cache(maxsize=1024)
def kernel_for(config: DecodeConfig, dtype: str, arch: str) -> Compiled:
    from cutex.compile import compile

    Decode = import_module(f"{package('attention_decode', arch)}.decode").Decode

    return compile(Decode(config), dtype, arch)
