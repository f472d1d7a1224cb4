"""Which calls of flash_attn_with_kvcache have many queries, and the forward kernel for them: a
chunk of a prompt is bound by tensor cores, so its keys are read once for all rows of a tile, of
more rows than decode's, and cut only where tiles do not fill the GPU.
"""

from __future__ import annotations

from dataclasses import replace

from cutex.arch import arch, kernels_of
from cutex.device.row_source import ATOM_ROWS
from cutex.kernels.attention.forward.choose import fitted
from cutex.kernels.attention.forward.config import ForwardConfig
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.spec import AttentionSpec, Shape
from cutex.ops.attention.call import kernel_dims
from cutex.ops.attention.kvcache_call import KVCacheCall
from cutex.ops.attention.plan import resources

# packed rows of a sequence from which on the forward kernel is used: where its tiles are split, at
# head dim 256 and else, and where they are not (docs/facts/decode.md#one-tile)
SPLIT_ROWS_256, SPLIT_ROWS, MANY_ROWS = 120, 129, 256
FULL = 0.6  # of the rows of tiles that are split
ABSENT = "cache_batch_idx", "cache_leftpad", "cu_seqlens_k_new", "k", "v"


def is_of_many_queries(call: KVCacheCall, arch_name: str) -> bool:
    """Whether the forward kernel can compute a call, and is faster: its tiles are split for all
    SMs, or there are tiles for most (docs/facts/decode.md#chunks-split, #many-rows-two)."""
    if kernels_of(arch_name) != "sm_90a" or call.fp8 or call.num_splits:
        return False
    if any(getattr(call, name) is not None for name in ABSENT) or call.page_size % ATOM_ROWS:
        return False
    if call.page_table is None and not _is_list(call):
        return False
    if call.rows >= (SPLIT_ROWS_256 if max(call.head_dims) > 192 else SPLIT_ROWS):
        config = config_for(call, True, arch_name)
        if isinstance(config, Sm90ForwardConfig) and config.split:
            rows = call.longest_q * config.pack
            return rows >= FULL * config.tile_m * -(-rows // config.tile_m)
    sms, _ = resources(call.q.device, arch_name)
    tiles = call.batch * call.heads[1] * (call.rows // 128)
    fill = 0.7 if kernel_dims(*call.head_dims) == (128, 128) else 0.75
    return call.rows >= MANY_ROWS and tiles >= fill * sms


def _is_list(call: KVCacheCall) -> bool:
    """Whether the rows of all entries of the caches follow one another at one stride."""
    caches = call.k_cache, call.v_cache
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in caches)


def config_for(call: KVCacheCall, with_lse: bool, arch_name: str) -> ForwardConfig:
    """The config of the forward kernel for a call."""
    dims = kernel_dims(*call.head_dims)
    assert dims is not None, "check refuses other head dims"
    traits = call.traits(call.room, with_lse)
    spec = AttentionSpec(head_dim=dims[0], head_dim_v=dims[1], **traits)
    sms, l2_bytes = resources(call.q.device, arch_name)
    card = replace(arch(arch_name), num_sms=sms, l2_bytes=l2_bytes)
    return fitted(spec, shape_of(call), card)


def shape_of(call: KVCacheCall) -> Shape:
    """What the choice of a config takes of a call's sizes."""
    rows = call.q.shape[-3]
    mean = rows // call.batch if call.cu_seqlens_q is not None else rows
    return Shape(call.batch, *call.heads, call.longest_q, call.room, mean)
