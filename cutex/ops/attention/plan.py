"""`Plan`: the compiled kernel and the arguments for one flash_attn call's tensors.

A plan is valid for every call with the same dtypes, shapes, strides and options. q, k and v are
passed unchanged if TMA can step through them: head dim contiguous, base and all other strides a
multiple of 16 bytes; with seqused but no cu_seqlens, also batch entries that directly follow each
other. Otherwise the tensor is copied first, at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import ALL, arch
from cutex.compile.user_function import UserFunction
from cutex.kernels.attention.forward.choose import FITTED, fitted
from cutex.kernels.attention.spec import AttentionSpec, Shape
from cutex.ops.attention.call import DTYPES, AttentionCall, kernel_dims
from cutex.ops.device import SEVERAL_GPUS, launcher, on_device, simulated_arch
from cutex.ops.plain import empty_of, untraced
from cutex.ops.workspace import buffers, buffers_of, flags, flags_of
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.compile import Compiled
    from cutex.kernels.attention.forward.config import ForwardConfig

ALIGN = 16  # bytes
COUNTER = 2  # words of the dynamic scheduler's counter


def why_copied(x: Tensor, one_list: bool) -> str | None:
    """The reason why TMA cannot step through x (.., rows, heads, head dim), or None.

    one_list: the rows of all batch entries must follow one another at one stride.
    """
    if x.data_ptr() % ALIGN:
        return f"it starts at {x.data_ptr():#x}, which is no multiple of {ALIGN} bytes"
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return f"its head dim has stride {x.stride(-1)}, not 1"
    for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if n > 1 and (stride * x.element_size() % ALIGN or stride < 0):
            return f"its strides {x.stride()} are no multiples of {ALIGN} bytes"
    if one_list and x.dim() == 4 and x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
        return f"its batch entries, of strides {x.stride()}, do not follow one another"
    return None


def stepped(x: Tensor, one_list: bool) -> Tensor:
    """The same tensor, with strides that TMA takes also in the modes of size 1."""
    unit = ALIGN // x.element_size()
    strides = [
        s if n > 1 or s % unit == 0 else unit
        for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    if one_list and x.dim() == 4 and x.shape[0] == 1:
        strides[0] = x.shape[1] * strides[1]
    wanted = (*strides, 1)
    return x if wanted == x.stride() else x.as_strided(x.shape, wanted)


class Plan:
    """A call's kernel, the outputs to allocate for it, and the preparation of its operands before
    each launch."""

    def __init__(self, call: AttentionCall, with_lse: bool) -> None:
        self.functions = tuple(
            None if f is None else UserFunction(f) for f in (call.score_mod, call.mask_mod)
        )
        self.config = config_for(call, with_lse, self.functions)
        self.needs = self.config.workspace(shape_of(call))
        self.compiled = kernel_for(self.config, DTYPES[call.q.dtype], arch_of(call.q.device))
        self.shape, self.strides = call.out_shape, contiguous(call.out_shape)
        self.lse_shape, self.lse_strides = call.lse_shape, contiguous(call.lse_shape)
        self.device = call.q.device
        lists = (call.seqused_q is not None, *(call.seqused_k is not None,) * 2)
        self.lists = lists
        self.copied = {
            name: why
            for name, one_list in zip("qkv", lists, strict=True)
            if (why := why_copied(getattr(call, name), one_list)) is not None
        }
        self.as_given = not self.copied and all(
            stepped(x, one) is x for x, one in zip((call.q, call.k, call.v), lists, strict=True)
        )
        left, right = call.window
        scalars: list[float | int] = [call.scale]
        if self.config.softcap:
            scalars.append(float(call.softcap))
        if left is not None:
            scalars.append(-left)
        if right:
            scalars.append(right)
        if self.config.varlen_q:
            scalars.append(int(longest_q(call)))
        self.scalars = tuple(scalars)
        self.launch: Callable[..., None] | None = None
        sink = call.learnable_sink
        self.rest_as_given = all(x.is_contiguous() for x in call.lengths.values()) and (
            sink is None or (sink.dtype == torch.float32 and sink.is_contiguous())
        )
        self.is_dense = not call.lengths and sink is None and call.alibi_slopes is None
        self.dtype = call.q.dtype
        # set at the first launch if all tensors are passed as they are given: a function of q, k,
        # v, the lengths and the sink that does the same in a third of the time
        self.short: Callable[..., Any] | None = None
        self.has_functions = any(self.functions)

    def is_current(self) -> bool:
        """Whether the user's functions in it still compute the same."""
        return all(f is None or f.is_current() for f in self.functions)

    def outputs(self, q: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The tensor to write O to, allocated if `out` is None, and that of LSE, if it is
        wanted."""
        if out is None or why_copied(out, one_list=self.lists[0]) is not None:
            out = q.new_empty_strided(self.shape, self.strides)
        elif not self.as_given:
            out = stepped(out, self.lists[0])
        if not self.config.lse:
            return out, None
        return out, q.new_empty_strided(self.lse_shape, self.lse_strides, dtype=torch.float32)

    def __call__(
        self, call: AttentionCall, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Launch on the tensors of `call`; ValueError or TypeError if they are not like the plan's.
        `given` is where to write O."""
        q, k, v, lengths = call.q, call.k, call.v, call.lengths.values()
        out, lse = self.outputs(q, given)
        if not self.as_given:
            q, k, v = (
                packed(x) if name in self.copied else stepped(x, one_list)
                for name, x, one_list in zip("qkv", (q, k, v), self.lists, strict=True)
            )
        arguments: list[Any] = [q, k, v, out]
        if lse is not None:
            arguments.append(lse)
        arguments += [x if x.is_contiguous() else x.contiguous() for x in lengths]
        if call.learnable_sink is not None:
            arguments.append(call.learnable_sink.to(torch.float32).contiguous())
        if call.alibi_slopes is not None:
            arguments.append(call.alibi_slopes)
        if self.needs.sums:
            arguments += reversed(buffers(self.needs, self.device))
        elif self.needs.flags:
            arguments.append(flags(self.device, self.needs.flags))
        arguments += self.scalars
        if self.launch is None:
            self.launch = on_device(self.device, launcher(self.compiled, arguments))
            # NOTE: of lengths on the CPU the values are checked at each call
            if self.as_given and self.rest_as_given and not (lengths and q.is_cpu):
                self.short = self._short(self.launch, alone=self.is_dense)
        self.launch(*arguments)
        if given is None:
            return out, lse
        if out.data_ptr() != given.data_ptr():
            given.copy_(out)
        return given, lse

    def short_with(self, out: Tensor) -> Callable[..., Any] | None:
        """`short` allocating O with the strides of `out`; None if there is no `short`, or the
        kernel cannot write such an O directly."""
        one_list = self.lists[0]
        if self.short is None or self.launch is None or why_copied(out, one_list) is not None:
            return None
        if stepped(out, one_list) is not out:
            return None
        return self._short(self.launch, self.is_dense, out.stride())

    def _short(
        self, launch: Callable[..., None], alone: bool, strides: tuple[int, ...] | None = None
    ) -> Callable[..., Any]:
        """A function that launches and returns what flash_attn_func returns, without repeating the
        plan's decisions; `alone`: it is passed q, k and v, and no further tensors. O has these
        `strides`, by default those of a contiguous tensor."""
        shape, lse_shape, lse_strides = self.shape, self.lse_shape, self.lse_strides
        strides = self.strides if strides is None else strides
        scalars, dtype = self.scalars, self.dtype
        with_lse, needs = self.config.lse, self.needs
        empty, of_lse = empty_of(self.device, SEVERAL_GPUS), torch.float32
        is_cut, dynamic = needs.sums > 0, needs.flags > 0
        counter, both = flags_of(self.device, needs.flags), buffers_of(needs, self.device)

        @untraced
        def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
            out = empty(shape, strides, dtype)
            if is_cut:
                sums, words = both()
                rest = (*rest, words, sums)
            elif dynamic:
                rest = (*rest, counter())
            if not with_lse:
                launch(q, k, v, out, *rest, *scalars)
                return out
            lse = empty(lse_shape, lse_strides, of_lse)
            launch(q, k, v, out, lse, *rest, *scalars)
            return out, lse

        if not alone or is_cut or len(scalars) > 1:
            return run
        scale = scalars[0]

        @untraced
        def run_dense(q: Tensor, k: Tensor, v: Tensor) -> Any:
            """`_short` for q, k and v alone, without unpacking, which costs as much as looking up
            the plan."""
            out = empty(shape, strides, dtype)
            if with_lse:
                lse = empty(lse_shape, lse_strides, of_lse)
                if dynamic:
                    launch(q, k, v, out, lse, counter(), scale)
                else:
                    launch(q, k, v, out, lse, scale)
                return out, lse
            if dynamic:
                launch(q, k, v, out, counter(), scale)
            else:
                launch(q, k, v, out, scale)
            return out

        return run_dense


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


def packed(x: Tensor) -> Tensor:
    """A copy that TMA can step through."""
    return x.clone(memory_format=torch.contiguous_format)


def longest_q(call: AttentionCall) -> int:
    """The largest number of queries that a sequence can have."""
    rows = call.q.shape[-3]
    most = call.max_seqlen_q if call.cu_seqlens_q is not None else None
    return rows if most is None else min(most, rows)


def longest_k(call: AttentionCall) -> int:
    """The largest number of keys that a sequence can have."""
    rows = call.k.shape[-3]
    most = call.max_seqlen_k if call.cu_seqlens_k is not None else None
    return rows if most is None else min(most, rows)


def mean_q(call: AttentionCall) -> int:
    """The mean number of queries of a sequence, as far as shapes tell it."""
    rows = call.q.shape[-3]
    return rows // call.batch if call.cu_seqlens_q is not None else rows


def mean_k(call: AttentionCall) -> int:
    """The mean number of keys of a sequence, as far as shapes tell it."""
    rows = call.k.shape[-3]
    return rows // call.batch if call.cu_seqlens_k is not None else rows


# ---- the kernel


def config_for(
    call: AttentionCall, with_lse: bool, functions: tuple[UserFunction | None, ...]
) -> ForwardConfig:
    left, right = call.window
    dims = kernel_dims(*call.head_dims)
    assert dims is not None, "check refuses other head dims"
    head_dim, head_dim_v = dims
    spec = AttentionSpec(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=right == 0,
        window=(left is not None, bool(right)),
        varlen_q=call.cu_seqlens_q is not None,
        varlen_k=call.cu_seqlens_k is not None,
        used_q=call.seqused_q is not None,
        used_k=call.seqused_k is not None,
        softcap=call.softcap != 0,
        sink=call.learnable_sink is not None,
        alibi=call.alibi_slopes is not None,
        lse=with_lse,
        score_mod=functions[0],
        mask_mod=functions[1],
    )
    target = arch_of(call.q.device)
    num_sms, l2_bytes = resources(call.q.device, target)
    card = replace(arch(target), num_sms=num_sms, l2_bytes=l2_bytes)
    return fitted(spec, shape_of(call), card)


def shape_of(call: AttentionCall) -> Shape:
    """What the choice of a config takes of a call's sizes."""
    return Shape(
        call.batch,
        *call.heads,
        longest_q=int(longest_q(call)),
        longest_k=mean_k(call) if call.max_seqlen_k is None else int(longest_k(call)),
        mean_q=mean_q(call),
    )


@cache
def resources(device: torch.device, name: str) -> tuple[int, int]:
    """The number of SMs, and the bytes of L2."""
    if device.type != "cuda":
        simulated = arch(name)
        return simulated.num_sms, simulated.l2_bytes
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.L2_cache_size


@lru_cache(maxsize=4096)
def kernel_for(config: ForwardConfig, dtype: str, arch: str) -> Compiled:
    from cutex.compile import compile

    Forward = import_module(f"{package('attention', arch)}.forward").Forward

    functions = (config.score_mod, config.mask_mod)
    cache = all(f.cacheable for f in functions if isinstance(f, UserFunction))
    return compile(Forward(config), dtype, arch, cache=cache)


# ---- the device


def arch_name(device: torch.device) -> str | None:
    """The arch of the GPU `device`, or the arch simulated for the CPU; None for other devices."""
    if device.type == "cpu":
        return simulated_arch()
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    known = {x.capability: x.name for x in ALL.values()}
    return known.get(capability, "sm_{}{}".format(*capability))


def arch_of(device: torch.device) -> str:
    """The arch of a device that `check_device` accepts; for others, as in tests of the host side,
    the first arch that has kernels."""
    name = arch_name(device)
    return name if name in FITTED else next(iter(FITTED))


def runs_on(device: torch.device) -> bool:
    """Whether there is a kernel for the device."""
    return arch_name(device) in FITTED


def check_device(device: torch.device) -> None:
    """Raise ValueError, in one sentence, if there is no kernel for the device."""
    name = arch_name(device)
    if name is None:
        raise ValueError(
            f"q is on {device}: flash_attn_func runs on a Hopper or Blackwell GPU; move its "
            'tensors there, or run them in the simulator with `with cutex.ops.simulated("sm_90a"):`'
        )
    if name not in FITTED:
        raise ValueError(
            f"q is on {device}, of arch {name}: flash_attn_func has kernels for "
            f"{', '.join(FITTED)}; use torch.nn.functional.scaled_dot_product_attention there"
        )
