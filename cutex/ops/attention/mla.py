"""`cutex.flash_mla_with_kvcache`: attention of new queries to a cache of latent keys (MLA).

Each call looks up a plan for its options that takes its tensors, and launches it.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.kernels.attention.mla.choose import CONFIGS
from cutex.kernels.attention.mla.config import MlaConfig
from cutex.ops.attention import cache_operators
from cutex.ops.attention.cache_plan import CacheOperator, Plan, of_parts, preparations
from cutex.ops.attention.call import DTYPES
from cutex.ops.attention.mla_call import MlaCall, check, refuse_sparse
from cutex.ops.attention.mla_chosen import attend_to_chosen
from cutex.ops.attention.plan import packed, resources
from cutex.ops.device import current
from cutex.ops.plain import untraced

if TYPE_CHECKING:
    from cutex.compile import Compiled

OPERATOR = CacheOperator("flash_mla_with_kvcache", CONFIGS)
PLANS = OPERATOR.plans
_is_compiling = torch.compiler.is_dynamo_compiling


class MlaMetadata:
    """What `get_mla_metadata` returns. It is empty: kernels read the lengths and divide their work
    at each launch, so it stays valid while lengths and shapes change."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[MlaMetadata, None]:
    """The metadata that `flash_mla_with_kvcache` takes, as FlashMLA's function of this name: an
    object and None. All arguments are ignored."""
    return MlaMetadata(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor,
    head_dim_v: int = 512,
    tile_scheduler_metadata: MlaMetadata | None = None,
    num_splits: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of q to a cache of latent keys, whose first 512 columns are also the values (MLA);
    like FlashMLA's function of this name.

    q: (batch, tokens, heads, 576), bfloat16 or float16, any number of tokens and heads.
    k_cache: (pages, page size, 1, 576), any page size (64 is fastest); or, if block_table is None,
        (batch, room, 1, 576). Dtype of q, read in place.
    block_table: (batch, pages of the longest sequence) int32, the pages of each sequence.
    cache_seqlens: (batch,) int32, the keys of each sequence. Not read on the host. Cache contents
        past them may be anything.
    head_dim_v: 512.
    tile_scheduler_metadata: the result of get_mla_metadata, or None; nothing depends on it.
    indices: (batch, tokens, topk) int32, the keys that each token sees, as rows of the cache (page
        times page size plus row in the page), in any order; a key given twice counts twice. Entries
        outside of the cache, such as -1, are no keys, as in FlashMLA. block_table and cache_seqlens
        are then ignored. topk_length: (batch,) int32, how many entries are valid, by default all.
        FlashMLA itself takes indices only with fp8 caches.
    num_splits: None or 0 chooses the number of parts that a sequence's keys are divided into by all
        lengths; from 1 on, every sequence is divided into that many, whatever else is in the batch.
    softmax_scale: 576 ** -0.5 by default.
    causal: the last token is aligned with the last key.

    Returns out (batch, tokens, heads, 512) and lse (batch, heads, tokens) float32. Tokens that see
    no key have out 0 and, as in FlashMLA, an lse of +inf. There are no gradients.

    Raises TypeError or ValueError, in one sentence, for arguments that are not supported (among
    them FlashMLA's for fp8 caches and for sinks), and without a Hopper or Blackwell GPU. The values
    of int32 tensors are checked only on the CPU.
    """
    if _is_compiling():
        numbers = head_dim_v, num_splits or 0, softmax_scale, causal
        return cache_operators.attend_to_latent(
            q, k_cache, block_table, cache_seqlens, numbers, others, is_fp8_kvcache
        )
    if others or is_fp8_kvcache is not False:
        refuse_sparse(others, is_fp8_kvcache)
        if others.get("indices") is not None:
            given = others["indices"], others.get("topk_length")
            return attend_to_chosen(
                q, k_cache, *given, head_dim_v, num_splits or 0, softmax_scale, causal
            )
        if others.get("topk_length") is not None:
            raise ValueError("topk_length is given without indices")
    tensors: tuple[Tensor, ...] = (q, k_cache, cache_seqlens)
    if block_table is not None:
        tensors += (block_table,)
    splits = 0 if num_splits is None else num_splits
    key = head_dim_v, splits, softmax_scale, causal, block_table is None
    found = PLANS.launched(key, *tensors)
    if found is None:
        found = attend(MlaCall(q, k_cache, cache_seqlens, block_table, *key[:4]), key)
    return found


@untraced
def attend(call: MlaCall, key: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Run a call that has no plan, and keep one if later calls can have it."""
    check(call)
    OPERATOR.check_device(call.q.device)
    OPERATOR.check_no_gradient(call)
    if 0 in call.q.shape or 0 in call.k_cache.shape or call.room == 0:
        lse = torch.full(call.lse_shape, torch.inf, dtype=torch.float32, device=call.q.device)
        return call.q.new_zeros(call.out_shape), lse
    with current(call.q.device):
        plan = plan_of(call)
    found: tuple[Tensor, Tensor] = OPERATOR.run(plan, call.tensors, key)
    return found


def plan_of(call: MlaCall) -> Plan:
    c = config_for(call)
    units = call.q.shape[0] * -(-call.rows // c.tile_m)
    needs = of_parts(c, units, int(call.num_splits), 0 if c.combined else units * c.flags_of_unit)
    compiled = kernel_for(c, DTYPES[call.q.dtype], OPERATOR.arch_of(call.q.device))
    prepare = preparations(call.tensors)
    if is_no_list(call.q):
        prepare["q"] = packed
    return Plan(call, compiled, 2, True, (call.scale, int(call.num_splits)), needs, prepare)


def is_no_list(q: Tensor) -> bool:
    """Whether the heads of all tokens of a sequence do not follow one another at one stride."""
    return q.shape[1] > 1 and q.stride(1) != q.shape[2] * q.stride(2)


def config_for(call: MlaCall) -> MlaConfig:
    arch = OPERATOR.arch_of(call.q.device)
    sms, _ = resources(call.q.device, arch)
    config = CONFIGS[kernels_of(arch)](
        causal=call.causal and call.q.shape[1] > 1, page_size=call.page_size, num_sms=sms
    )
    return config.fitted(call.rows, call.q.shape[0], int(call.num_splits), call.room)


@lru_cache(maxsize=1024)
def kernel_for(config: MlaConfig, dtype: str, arch: str) -> Compiled:
    from cutex.compile import compile

    package = f"cutex.kernels.attention.mla.{kernels_of(arch).rstrip('a').replace('_', '')}"
    return compile(import_module(f"{package}.mla").Mla(config), dtype, arch)
