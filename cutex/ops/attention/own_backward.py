"""Gradients of attention by our kernels: preprocess, main and convert, in one call.

They need, besides the gradients, fp32 sums of dQ, as large as q in fp32 with each sequence's rows
rounded up to a tile, and two numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from cutex.kernels.attention.backward.choose import CONFIGS, Config, fitted
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.tail import (
    spare_sums,
)
from cutex.ops.attention import key_tiles, torch_backward
from cutex.ops.attention.call import DTYPES, AttentionCall, kernel_dims
from cutex.ops.attention.plan import (
    ALIGN,
    COUNTER,
    arch_name,
    arch_of,
    longest_k,
    longest_q,
    packed,
    resources,
    stepped,
    why_copied,
)
from cutex.ops.device import SEVERAL_GPUS, current, launcher, per_device
from cutex.ops.plain import empty_of
from cutex.ops.workspace import flags_of
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.compile import Compiled

FEW = 8  # tiles of keys a CTA, up to which `rotated` pays at head dim 64, too
# head dims whose tiles are never cut; those of a kernel that cuts them, and what its steps take of
# the others' time
UNCUT, CUT, WIDER = (96, 96), (128, 128), 1.25
UNTIMED = ("sm_100a", "sm_103a")  # whose kernels have run in the simulator only


def why_not(call: AttentionCall) -> str | None:
    """The reason why our kernels do not compute the gradients of the call, or None."""
    arch = arch_name(call.q.device)
    if arch not in CONFIGS:
        return f"the backward's kernels are for {', '.join(CONFIGS)}, q is on {arch}"
    if call.score_mod is not None or call.mask_mod is not None:
        return "score_mod or mask_mod, whose derivative is not known"
    if call.alibi_slopes is not None:
        return "alibi_slopes, which the backward's kernels do not know"
    if arch in UNTIMED and call.q.device.type == "cuda" and torch_backward.why_not(call) is None:
        return f"on {arch} torch's flash backward is taken where it can, until ours was timed"
    return None


def plan_for(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    grad_lse: Tensor | None,
    sink: bool = False,
) -> Plan | None:
    """The plan of a call's gradients, with `sink` one that also returns delta; None if our kernels
    do not compute them, or there is nothing to compute."""
    tensors = (call.q, call.k, call.v, grad_out, out, grad_lse, call.cu_seqlens_q,
               call.cu_seqlens_k, call.seqused_q, call.seqused_k)  # fmt: skip
    key = (
        *[None if x is None else (x.shape, x.stride(), x.data_ptr() % ALIGN) for x in tensors],
        call.alibi_slopes is None, call.q.dtype, call.q.device, call.max_seqlen_q,
        call.max_seqlen_k, call.softmax_scale, call.causal, tuple(call.window_size), call.softcap,
        call.deterministic, torch.are_deterministic_algorithms_enabled(), sink,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None and why_not(call) is None and not is_empty(call, out):
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(call, grad_out, out, grad_lse is not None, sink)
    return plan


MOST_PLANS = 1024
_plans: dict[tuple[Any, ...], Plan] = per_device({})


class Plan:
    """The kernel for one call's gradients, and what is allocated and prepared for them."""

    def __init__(
        self, call: AttentionCall, grad_out: Tensor, out: Tensor, dlse: bool, sink: bool = False
    ) -> None:
        c = self.config = config_for(call, dlse, sink)
        self.compiled = kernel_for(c, DTYPES[call.q.dtype], arch_of(call.q.device))
        self.device = call.q.device
        one_list = {"q": c.used_q and not c.varlen_q, "k": c.used_k and not c.varlen_k}
        given = (call.q, "q"), (call.k, "k"), (call.v, "k"), (out, "q"), (grad_out, "q")
        # how each operand is prepared: None if TMA can step through it as it is
        self.prepare: list[Callable[[Tensor], Tensor] | None] = [
            None if takes(x, one_list[side]) else partial(prepared, one_list=one_list[side])
            for x, side in given
        ]
        self.empty = empty_of(self.device, SEVERAL_GPUS)
        self.tiles = num_tiles(call, c)
        self.numbers = scalars(call, c)
        spare = 0
        if c.spread:
            spare = spare_sums(key_tiles.tail_of_call(call, c))
        elif c.head_parts:
            spare = key_tiles.kept_parts(call, cast(BackwardConfig, c))
        elif c.last_parts:
            spare = key_tiles.last_parts_of(call, cast(BackwardConfig, c)).kept(c.key_ctas)
        self.counter = flags_of(self.device, COUNTER + c.sum_warps * spare)
        self.gradients = [
            (tuple(x.shape), row_major(x.shape), x.dtype) for x in (call.q, call.k, call.v)
        ]
        of_tiles = (self.tiles, c.row_stats * c.tile_m), (self.tiles, c.tile_m * c.head_dim)
        turns = [(self.tiles, c.turns)] if c.deterministic else []
        self.before = [*map(numbers_of, of_tiles), *(numbers_of(x, torch.int32) for x in turns)]
        self.counts = c.counted or c.head_parts or c.last_parts
        self.behind = []  # what the counter is followed by
        if c.late_zeros:
            self.behind.append(numbers_of((call.batch * call.heads[1],), torch.int32))
        if c.spread or c.head_parts or c.last_parts:
            self.behind.append(numbers_of((max(spare, 1), c.partial_numbers)))
        if c.ranked:
            self.behind.append(numbers_of((call.batch + 1, 3), torch.int32))
        self.launch: Callable[..., None] | None = None

    def __call__(
        self,
        call: AttentionCall,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, contiguous; those of rows of no sequence are 0. A plan with
        a sink writes `delta`, (.., heads, rows), of the rows of sequences: the sum of grad_out *
        out less the gradient of LSE."""
        of_rows = [] if grad_lse is None else [grad_lse.float()]
        if delta is not None:
            of_rows.append(delta)
        given = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k
        lengths = [x for x in given if x is not None]
        with current(self.device):
            return self.run((call.q, call.k, call.v, out, grad_out), lse, of_rows, lengths)

    def run(
        self,
        operands: Sequence[Tensor],
        lse: Tensor,
        of_rows: Sequence[Tensor],
        lengths: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients, on the current device; `operands` are q, k, v, out and its gradient."""
        empty = self.empty
        operands = [
            x if prepare is None else prepare(x)
            for x, prepare in zip(operands, self.prepare, strict=True)
        ]
        dq, dk, dv = [empty(*x) for x in self.gradients]
        workspace = [empty(*x) for x in self.before]
        if self.counts:
            workspace.append(self.counter())
        workspace += [empty(*x) for x in self.behind]
        arguments = (
            *operands, lse, dq, dk, dv, *workspace, *of_rows, *[x.contiguous() for x in lengths],
            *self.numbers,
        )  # fmt: skip
        if self.launch is None:
            self.launch = launcher(self.compiled, list(arguments))
        self.launch(*arguments)
        return dq, dk, dv


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def numbers_of(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """The shape, strides and dtype of a contiguous workspace."""
    return shape, row_major(shape), dtype


def is_empty(call: AttentionCall, out: Tensor) -> bool:
    """Whether the call has no row, or no row has a key."""
    return 0 in (*out.shape, call.batch, longest_q(call), longest_k(call))


def config_for(call: AttentionCall, dlse: bool, sink: bool = False) -> Config:
    dims = kernel_dims(*call.head_dims)
    assert dims is not None, "check refuses other head dims"
    found = of_dims(call, dlse, sink, *dims)
    if dims == UNCUT and isinstance(found, BackwardConfig):
        wider = of_dims(call, dlse, sink, *CUT)
        assert isinstance(wider, BackwardConfig)
        steps = key_tiles.most_steps
        if wider.spread and WIDER * steps(call, wider) < steps(call, found):
            return wider
    return found


def of_dims(call: AttentionCall, dlse: bool, sink: bool, head_dim: int, head_dim_v: int) -> Config:
    """The config of a call by the kernel of these head dims."""
    left, right = call.window
    target = arch_of(call.q.device)
    # NOTE: CTAs wait for each other, so no more may be launched than run at one time
    num_sms, _ = resources(call.q.device, target)
    found = fitted(
        CONFIGS[target](
            num_ctas=num_sms,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=right == 0,
            window=(left is not None, bool(right)),
            varlen_q=call.cu_seqlens_q is not None,
            varlen_k=call.cu_seqlens_k is not None,
            used_q=call.seqused_q is not None,
            used_k=call.seqused_k is not None,
            softcap=call.softcap != 0,
            dlse=dlse,
            sink=sink,
            deterministic=call.deterministic or torch.are_deterministic_algorithms_enabled(),
        ),
        DTYPES[call.q.dtype],
    )
    tiles = -(-call.k.shape[-3] // found.tile_n) * call.batch * call.heads[1]
    if not isinstance(found, BackwardConfig):
        return found
    if found.may_rotate and tiles <= FEW * num_sms:
        found = replace(found, rotated=True)
    if found.may_ramp and key_tiles.pays_to_cut(call, found):
        return replace(found, spread=True, late_zeros=False)
    if found.late_zeros and key_tiles.begins_with_zeros(call, found):
        found = replace(found, late_zeros=False)
    if found.spread:
        return found
    parts, last = key_tiles.parts_of(call, found), key_tiles.last_parts_of(call, found)
    if last.parts > 1 and last.steps < key_tiles.steps_of(call, found, parts):
        return replace(found, last_parts=True)
    if parts.total > 1:
        return replace(found, head_parts=True, late_zeros=False)
    return found


def takes(x: Tensor, one_list: bool) -> bool:
    """Whether TMA can step through x as it is."""
    return why_copied(x, one_list) is None and stepped(x, one_list) is x


def prepared(x: Tensor, one_list: bool) -> Tensor:
    """x with strides that TMA takes, or a copy."""
    return packed(x) if why_copied(x, one_list) is not None else stepped(x, one_list)


def num_tiles(call: AttentionCall, config: Config) -> int:
    """The tiles of queries of all heads (signature.RowTiles)."""
    tile, rows = config.tile_m, call.q.shape[-3]
    if config.varlen_q:
        return (rows // tile + call.batch) * call.heads[0]
    return -(-rows // tile) * call.batch * call.heads[0]


def scalars(call: AttentionCall, config: Config) -> list[float | int]:
    left, right = call.window
    found: list[float | int] = [call.scale]
    if config.softcap:
        found.append(float(call.softcap))
    if left is not None:
        found.append(-left)
    if right:
        found.append(right)
    if config.varlen_q:
        found.append(int(longest_q(call)))
    if config.varlen_k:
        found.append(int(longest_k(call)))
    if config.head_parts:
        parts = key_tiles.parts_of(call, cast(BackwardConfig, config))
        found += [parts.total, parts.ranges]
    if config.last_parts:
        last = key_tiles.last_parts_of(call, cast(BackwardConfig, config))
        found += [last.parts, last.whole]
    return found


@lru_cache(maxsize=1024)
def kernel_for(config: Config, dtype: str, arch: str) -> Compiled:
    from cutex.compile import compile

    place = f"{package('attention_backward', arch)}.{config.kernel_module}"
    return compile(import_module(place).Backward(config), dtype, arch)
