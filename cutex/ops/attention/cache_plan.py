"""Plans of calls that attend to caches, and the operators that own them.

A plan holds a call's kernel and what is allocated for each launch; it serves later calls whose
tensors are like those it was made for. No length is read on the host, so a CUDA graph may be
replayed while lengths and pages change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.compile import Workspace
from cutex.compile.arguments import MAX_SIZE
from cutex.kernels.attention.decode.config import WORDS
from cutex.kernels.attention.decode.splits import Splits
from cutex.ops.attention.cache import MOST_ROWS, stepped
from cutex.ops.attention.plan import ALIGN, arch_name, contiguous, packed, why_copied
from cutex.ops.device import SEVERAL_GPUS, current, launcher, on_device
from cutex.ops.plain import empty_of, guard, untraced
from cutex.ops.plans import PlanCache
from cutex.ops.workspace import buffers, buffers_of, untouched_of
from cutex.ops.written import are_apart, check_writable, spans_apart, written_all

if TYPE_CHECKING:
    from cutex.compile import Compiled

Preparation = Callable[[Tensor], Tensor]
in_inference_mode = torch.is_inference_mode_enabled


class CacheCall(Protocol):
    """The arguments of a call: its tensors, and what is computed of them."""

    @property
    def q(self) -> Tensor: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...
    @property
    def out_shape(self) -> tuple[int, ...]: ...
    @property
    def lse_shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class CacheOperator:
    """A function that attends to caches: its configs by arch, and its plans."""

    name: str
    configs: Mapping[str, type[Any]]
    plans: PlanCache = field(default_factory=PlanCache)

    def arch_of(self, device: torch.device) -> str:
        """The arch of a device that `check_device` accepts; else the first that has kernels."""
        name = arch_name(device)
        known = name is not None and kernels_of(name) in self.configs
        return name if name is not None and known else next(iter(self.configs))

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError, in one sentence, if there is no kernel for the device."""
        name = arch_name(device)
        if name is None or kernels_of(name) not in self.configs:
            where = f"{device}" if name is None else f"{device}, of arch {name}"
            raise ValueError(
                f"q is on {where}: {self.name} has kernels for {', '.join(self.configs)}; move its "
                "tensors there, or run them in the simulator with "
                '`with cutex.ops.simulated("sm_90a"):`'
            )

    def check_no_gradient(self, call: CacheCall) -> None:
        """Raise ValueError, in one sentence, if a gradient or a transform of torch is wanted."""
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, call.tensors.values())):
            raise ValueError(f"{self.name} cannot be called under torch.func's transforms")
        if torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors.values()):
            raise ValueError(f"{self.name} has no gradient: call it under torch.no_grad()")

    @untraced
    def run(
        self,
        plan: Plan,
        tensors: dict[str, Tensor],
        key: tuple[Any, ...],
        rooms: range | None = None,
    ) -> Any:
        """Launch a new plan, and keep it under this key for later calls, if they can use it; with
        `rooms`, also for calls whose caches have room for another of these numbers of keys."""
        given = list(tensors.values())
        plan.grows = rooms is not None
        with current(plan.device):
            result = plan(*given)
        if plan.as_given:
            assert plan.run is not None, "it was launched"
            takes = None if rooms is None else growing(tensors, rooms)
            self.plans.remember(PlanCache.key_of(key, *given), given, plan.run, takes=takes)
        return result


class Plan:
    """A call's kernel, and what is allocated for each launch.

    The kernel takes the first `operands` tensors, O and, with `with_lse`, LSE, the other tensors,
    `numbers` and a workspace; or with `words_first`, as the forward kernel, and if flags are all of
    it, the flags, what else there is, and then these. `prepare`: what is done to tensors before, by
    name. `untouched`: no launch looks at the workspace.
    """

    def __init__(
        self,
        call: CacheCall,
        compiled: Compiled,
        operands: int,
        with_lse: bool,
        numbers: tuple[float | int, ...],
        needs: Workspace,
        prepare: dict[str, Preparation],
        untouched: bool = False,
        words_first: bool = False,
    ) -> None:
        self.compiled, self.device, self.operands = compiled, call.q.device, operands
        shapes = [(call.out_shape, call.q.dtype), (call.lse_shape, torch.float32)]
        self.outputs = [(x, contiguous(x), dtype) for x, dtype in shapes[: 1 + with_lse]]
        self.numbers, self.needs, self.prepare = numbers, needs, prepare
        self.untouched, self.words_first = untouched, words_first
        self.names = tuple(call.tensors)
        # NOTE: of lengths on the CPU the values are checked at each call
        integers = any(x.dtype == torch.int32 for x in call.tensors.values())
        self.as_given = not prepare and not (integers and call.q.is_cpu)
        self.grows = False  # caches of later calls may have other sizes
        # of tensors that the kernel takes as they are; made at the first launch
        self.run: Callable[..., Any] | None = None
        self.launch: Callable[..., None] | None = None  # of the kernel

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
        needs, n = self.needs, self.operands
        empty = empty_of(self.device, SEVERAL_GPUS)
        numbers, at_first = self._last_of(lambda: buffers(needs, self.device))
        outputs = [empty(*x) for x in self.outputs]
        first = [*given[:n], *outputs, *given[n:], *numbers, *at_first()]
        self.launch = on_device(self.device, launcher(self.compiled, first))
        run = self.writing(self.outputs[0][1])
        if "k" not in self.names:
            return run
        assert self.names[-2:] == ("k", "v"), "what is appended comes last"
        return appending(run, None if self.grows else given)

    def _last_of(
        self, of_stream: Callable[[], tuple[Any, Any]]
    ) -> tuple[tuple[Any, ...], Callable[[], tuple[Any, ...]]]:
        """The kernel's last arguments, its numbers and then the result of a function: its
        workspace, or that with the numbers behind it."""
        needs, numbers = self.needs, self.numbers
        if needs.sums and not self.words_first:
            return numbers, of_stream if needs.flags else lambda: of_stream()[:1]
        if needs.sums:
            return (), lambda: (*reversed(of_stream()), *numbers)
        if needs.flags:
            return (), lambda: (of_stream()[1], *numbers)
        return numbers, tuple

    def writing(self, strides: tuple[int, ...]) -> Callable[..., Any]:
        """A function that launches, once `run` has, on tensors like its, allocating O with these
        strides."""
        needs, n, launch = self.needs, self.operands, self.launch
        assert launch is not None, "it was launched"
        empty = empty_of(self.device, SEVERAL_GPUS)
        (shape, _, dtype), *of_lse = self.outputs
        of_stream = (untouched_of if self.untouched else buffers_of)(needs, self.device)
        numbers, last = self._last_of(of_stream)

        @untraced
        def run(*tensors: Tensor) -> Any:
            out = empty(shape, strides, dtype)
            if not of_lse:
                launch(*tensors[:n], out, *tensors[n:], *numbers, *last())
                return out
            lse = empty(*of_lse[0])
            launch(*tensors[:n], out, lse, *tensors[n:], *numbers, *last())
            return out, lse

        @untraced
        def run_alone(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
            """`run` for three operands without LSE, in less time."""
            out = empty(shape, strides, dtype)
            launch(q, k, v, out, *rest, *numbers, *last())
            return out

        return run_alone if n == 3 and not of_lse else run


def of_parts(config: Any, units: int, num_splits: int, flags: int) -> Workspace:
    """The workspace for the parts of `units` units. Raises ValueError, in one sentence, if a kernel
    could not count its elements."""
    slots = Splits.slots(config.ctas, units, num_splits)
    words = WORDS * units if config.combined else 0
    needs = Workspace(words + slots * config.tile_m * (config.head_dim_v + 1), flags)
    if needs.sums > MAX_SIZE:
        raise ValueError(
            f"num_splits={num_splits}: so many parts of {units} blocks of queries take "
            f"{needs.sums * 4 / 1e9:.1f} GB, at most {MAX_SIZE * 4 / 1e9:.1f}"
        )
    return needs


def appending(run: Callable[..., Any], like: list[Tensor] | None = None) -> Callable[..., Any]:
    """`run`, which writes its last two tensors into the caches (its second and third), registered
    with torch as a write to those. Each has the sizes and strides of the one in `like`, if given.
    """
    far: Callable[..., bool] = _never
    if like is not None:
        far = spans_apart((like[1], like[2]), (like[0], *like[-2:]))
    # NOTE: a guard made outside of inference mode takes no inference tensors there, and within it
    # all may be written to; to one made within it, caches of both kinds look alike
    by_guard = not in_inference_mode()

    @untraced
    def run_apart(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Tensor) -> Any:
        k, v = rest[-2:]
        if not far(k_cache, v_cache, q, k, v) and not are_apart((k_cache, v_cache), (q, k, v)):
            raise ValueError("a cache that k and v are appended to shares memory with an argument")
        if not by_guard and not in_inference_mode():
            for name, cache in zip(("k_cache", "v_cache"), (k_cache, v_cache), strict=True):
                check_writable(name, cache)
        result = run(q, k_cache, v_cache, *rest)
        written_all((k_cache, v_cache))
        return result

    return run_apart


def _never(*tensors: Tensor) -> bool:
    return False


def growing(tensors: dict[str, Tensor], rooms: range) -> Callable[..., bool]:
    """A guard of a plan's tensors that accepts caches with room for any of `rooms` keys, as when
    each token's cache is a new tensor."""
    names = list(tensors)
    k, v = (names.index(name) for name in ("k_cache", "v_cache"))
    alike = guard(list(tensors.values()), (k, v))
    pages, unit = tensors["k_cache"].shape[0], ALIGN // tensors["k_cache"].element_size()
    least, most = rooms.start, rooms.stop - 1

    def steps(x: Tensor) -> bool:
        """Whether a kernel takes a cache as it is (cache.why_no_steps, check_in_place)."""
        outer, row, head, _ = x.stride()
        return (
            outer > 0
            and row > 0
            and head > 0
            and not (outer | row | head) % unit
            and not outer % row
            and (pages - 1) * (outer // row) + most <= MOST_ROWS
        )

    @untraced
    def takes(*given: Tensor) -> bool:
        if not alike(*given):
            return False
        keys, values = given[k], given[v]
        room = keys.shape[1]
        return least <= room <= most and values.shape[1] == room and steps(keys) and steps(values)

    return takes


def preparations(tensors: dict[str, Tensor]) -> dict[str, Preparation]:
    """The preparations before each launch of the tensors that the kernel cannot take as they
    are."""
    found = {name: preparation(name, x) for name, x in tensors.items()}
    return {name: how for name, how in found.items() if how is not None}


def preparation(name: str, x: Tensor) -> Preparation | None:
    """The preparation of a tensor before each launch; None if the kernel takes it as it is."""
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
