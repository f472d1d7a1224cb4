"""`cutex.flash_mla_with_kvcache`: attention of new queries to a cache of latent keys (MLA).

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
from cutex.kernels.attention.decode.splits import Splits
from cutex.kernels.attention.mla.choose import CONFIGS
from cutex.kernels.attention.mla.config import MlaConfig
from cutex.ops.attention.call import DTYPES
from cutex.ops.attention.kvcache import preparation
from cutex.ops.attention.mla_call import TENSORS, MlaCall, check, refuse_sparse
from cutex.ops.attention.plan import arch_name, contiguous, packed, resources
from cutex.ops.device import SEVERAL_GPUS, current, launcher, on_device
from cutex.ops.plain import empty_of, untraced
from cutex.ops.plans import PlanCache
from cutex.ops.workspace import buffers_of

if TYPE_CHECKING:
    from cutex.compile import Compiled

PLANS = PlanCache()
WORDS = 4  # of the workspace, for each unit (kernels/attention/mla/combine.py)


class MlaMetadata:
    """What `get_mla_metadata` returns: nothing is kept in it, since kernels read the lengths and
    share out their work at each launch. It stays valid while lengths and shapes change."""


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
    """Attention of q to a cache of latent keys, whose first 512 columns are the values, too (MLA);
    as FlashMLA's function of this name.

    q (batch, tokens, heads, 576), bfloat16 or float16: any number of tokens and of heads.
    k_cache (pages, page size, 1, 576), pages of any size, 64 the fastest; or, where block_table is
        None, (batch, room, 1, 576). Dtype of q, read in place.
    block_table (batch, pages of the longest) int32: which pages a sequence has.
    cache_seqlens (batch,) int32: the keys of each sequence. Not read on the host; what lies behind
        in the cache may be anything.
    head_dim_v: 512.
    tile_scheduler_metadata: what get_mla_metadata returned, or None; nothing depends on it.
    num_splits: None or 0, into how many parts a sequence's keys are cut is chosen by all lengths;
        from 1 on every sequence is cut into as many, whatever else is in the batch.
    softmax_scale: 576 ** -0.5 by default. causal: the last token is aligned with the last key.

    Returns out (batch, tokens, heads, 512) and lse (batch, heads, tokens) float32. Tokens that see
    no key have out 0 and, as FlashMLA's, an lse of +inf. There are no gradients. Raises TypeError
    or ValueError, with one sentence, for arguments that do not fit, among them FlashMLA's for
    caches in fp8 and for chosen keys, and where there is no Hopper or Blackwell GPU. What the int32
    tensors hold is checked on the CPU only.
    """
    if others or is_fp8_kvcache:
        refuse_sparse(others, is_fp8_kvcache)
    call = MlaCall(
        q, k_cache, cache_seqlens, block_table,
        head_dim_v, 0 if num_splits is None else num_splits, softmax_scale, causal,
    )  # fmt: skip
    tensors = call[:TENSORS] if block_table is not None else call[: TENSORS - 1]
    key = *call[TENSORS:], block_table is None
    found = PLANS.launched(key, *tensors)
    return attend(call, key) if found is None else found


@untraced
def attend(call: MlaCall, key: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Run a call that has no plan, and keep one if later calls can have it."""
    check(call)
    check_device(call.q.device)
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors.values()):
        raise ValueError("flash_mla_with_kvcache has no gradient: call it under torch.no_grad()")
    if 0 in call.q.shape or 0 in call.k_cache.shape or call.room == 0:
        lse = torch.full(call.lse_shape, torch.inf, device=call.q.device)
        return call.q.new_zeros(call.out_shape), lse
    with current(call.q.device):
        plan = Plan(call)
        result = plan(*call.tensors.values())
    if plan.as_given:
        assert plan.run is not None, "it was launched"
        given = list(call.tensors.values())
        PLANS.remember(PLANS.key_of(key, *given), given, plan.run)
    return result


class Plan:
    """A call's kernel, and what is allocated for each launch."""

    def __init__(self, call: MlaCall) -> None:
        c = config_for(call)
        self.compiled = kernel_for(c, DTYPES[call.q.dtype], arch_of(call.q.device))
        self.device, self.dtype = call.q.device, call.q.dtype
        self.shapes = call.out_shape, call.lse_shape
        self.prepare: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, x in call.tensors.items():
            how = packed if name == "q" and is_no_list(x) else preparation(name, x)
            if how is not None:
                self.prepare[name] = how
        self.names = tuple(call.tensors)
        # NOTE: of lengths on the CPU the values are checked at each call
        self.as_given = not self.prepare and not call.q.is_cpu
        self.numbers = call.scale, int(call.num_splits)
        units = call.q.shape[0] * -(-call.rows // c.tile_m)
        slots = Splits.slots(c.ctas, units, int(call.num_splits))
        self.needs = Workspace(WORDS * units + slots * c.tile_m * (c.head_dim_v + 1), 0)
        # of tensors that the kernel takes as they are; made at the first launch
        self.run: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Launch on tensors like the call's."""
        given = [
            self.prepare[name](x) if name in self.prepare else x
            for name, x in zip(self.names, tensors, strict=True)
        ]
        if self.run is None:
            self.run = self._run(given)
        return self.run(*given)

    def _run(self, given: list[Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        """A function that launches on tensors like `given` and returns the result, without
        repeating the plan's decisions."""
        buffers = buffers_of(self.needs, self.device)
        empty = empty_of(self.device, SEVERAL_GPUS)
        dtype, numbers, of_lse = self.dtype, self.numbers, torch.float32
        (shape, lse_shape), strides = self.shapes, [contiguous(x) for x in self.shapes]
        outputs = empty(shape, strides[0], dtype), empty(lse_shape, strides[1], of_lse)
        first = [*given[:2], *outputs, *given[2:], *numbers, buffers()[0]]
        launch = on_device(self.device, launcher(self.compiled, first))

        @untraced
        def run(q: Tensor, k_cache: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = empty(shape, strides[0], dtype), empty(lse_shape, strides[1], of_lse)
            launch(q, k_cache, out, lse, *rest, *numbers, buffers()[0])
            return out, lse

        return run


def is_no_list(q: Tensor) -> bool:
    """Whether the heads of all tokens of a sequence do not follow one another at one stride."""
    return q.shape[1] > 1 and q.stride(1) != q.shape[2] * q.stride(2)


def config_for(call: MlaCall) -> MlaConfig:
    arch = arch_of(call.q.device)
    sms, _ = resources(call.q.device, arch)
    config = CONFIGS[kernels_of(arch)](
        causal=call.causal and call.q.shape[1] > 1, page_size=call.page_size, num_sms=sms
    )
    return config.fitted(call.rows)


@lru_cache(maxsize=1024)
def kernel_for(config: MlaConfig, dtype: str, arch: str) -> Compiled:
    from cutex.compile import compile

    package = f"cutex.kernels.attention.mla.{kernels_of(arch).rstrip('a').replace('_', '')}"
    return compile(import_module(f"{package}.mla").Mla(config), dtype, arch)


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
            f"q is on {where}: flash_mla_with_kvcache has kernels for {', '.join(CONFIGS)}; move "
            "its tensors there, or run them in the simulator with "
            '`with cutex.ops.simulated("sm_90a"):`'
        )
