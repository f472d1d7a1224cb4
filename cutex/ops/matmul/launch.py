"""The launch of a planned matmul, whose operands are passed as they are given.

A launch is a function of the call's tensors, each once, in the order of `Call.tensors`. It checks
what neither a plan's key nor its guard covers: that no output shares memory with an input, and, by
the launcher, that bases are aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutex.ops.device import SEVERAL_GPUS, on_device
from cutex.ops.matmul.arrange import Arranged
from cutex.ops.matmul.checks import Call
from cutex.ops.overlap import share_memory, span
from cutex.ops.plain import empty_of, untraced


def launch_of(
    function: Callable[..., None], call: Call, arranged: Arranged
) -> Callable[..., Tensor]:
    """The launch of calls like `call`, by `function`, which takes the tensors of `arranged`."""
    function = on_device(call.a.device, function)
    names, one = tuple(arranged.names), call.a is call.b
    few = names == () or (names == ("bias",) and not one and _is_vector(call.bias))
    if call.out is None and few:
        return _of_few(function, call, arranged.flattened)
    if not (call.out is None or names or arranged.flattened):
        return _into_out(function, call)
    return Launch(function, call, arranged)


def _is_vector(x: Tensor | None) -> bool:
    return x is not None and x.dim() == 1


def _of_few(function: Callable[..., None], call: Call, flattened: bool) -> Callable[..., Tensor]:
    """The launch of calls with a, b and perhaps a bias, whose result is allocated.

    NOTE: one function for each form, since each step of Python costs 0.1 us.
    """
    shape, dtype, empty = call.shape, call.dtype, empty_of(call.a.device, SEVERAL_GPUS)
    strides = torch.empty(call.shape, device="meta").stride()
    k, n = call.a.shape[-1], shape[-1]

    @untraced
    def of_one(a: Tensor) -> Tensor:
        out = empty(shape, strides, dtype)
        function(a, a, out)
        return out

    @untraced
    def of_two(a: Tensor, b: Tensor) -> Tensor:
        out = empty(shape, strides, dtype)
        function(a, b, out)
        return out

    @untraced
    def with_bias(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        out = empty(shape, strides, dtype)
        function(a, b, out, bias)
        return out

    @untraced
    def of_flattened(a: Tensor, b: Tensor, *bias: Tensor) -> Tensor:
        out = empty(shape, strides, dtype)
        function(a.view(-1, k), b, out.view(-1, n), *bias)
        return out

    if flattened:
        return of_flattened
    if call.a is call.b:
        return of_one
    return of_two if call.bias is None else with_bias


def _into_out(function: Callable[..., None], call: Call) -> Callable[..., Tensor]:
    """The launch of calls with an out, and no other tensor beside a and b."""
    overlaps = _overlap(call)

    @untraced
    def of_two(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        if overlaps(out, a, b):
            raise ValueError("out shares memory with an input")
        function(a, b, out)
        return out

    @untraced
    def of_one(a: Tensor, out: Tensor) -> Tensor:
        return of_two(a, a, out)

    return of_one if call.a is call.b else of_two


def _overlap(call: Call) -> Callable[[Tensor, Tensor, Tensor], bool]:
    """Whether out shares memory with a or b, which is asked only where the distance of their bases
    allows it."""
    assert call.out is not None
    low, high_a, high_b = -span(call.out), span(call.a), span(call.b)

    def overlaps(out: Tensor, a: Tensor, b: Tensor) -> bool:
        start = out.data_ptr()
        if low < start - a.data_ptr() < high_a and share_memory(out, a):
            return True
        return low < start - b.data_ptr() < high_b and share_memory(out, b)

    return overlaps


class Launch:
    """The launch of a call with further tensors, or numbers, or of a batch that is flattened."""

    def __init__(self, function: Callable[..., None], call: Call, arranged: Arranged) -> None:
        self.function = function
        given = [name for name in call.tensors if name != "b" or call.a is not call.b]
        self.places = {name: place for place, name in enumerate(given)}
        self.b = self.places.get("b", 0)
        self.out, self.amax = self.places.get("out"), self.places.get("amax")
        self.shape, self.dtype = call.shape, call.dtype
        self.strides = torch.empty(call.shape, device="meta").stride()
        self.empty = empty_of(call.a.device, SEVERAL_GPUS)
        self.flattened = arranged.flattened
        vectors = "bias", "scale_a", "scale_b", "amax"  # those of other forms are viewed as such
        self.flat = {n for n in vectors if n in call.tensors and call.tensors[n].dim() != 1}
        self.numbers = {"alpha": float(call.alpha), "beta": float(call.beta)}
        self.names = arranged.names  # names of the arguments beside a, b and out
        passed = dict(zip(self.names, arranged.tensors[3:], strict=True))
        self.copies_out = "c" in passed and passed["c"].data_ptr() != arranged.tensors[2].data_ptr()
        self.overlaps = _overlap(call) if call.out is not None else None

    @untraced
    def __call__(self, *tensors: Tensor) -> Tensor:
        a, b, at = tensors[0], tensors[self.b], self.out
        if self.overlaps is None:
            result = self.empty(self.shape, self.strides, self.dtype)
        else:
            assert at is not None
            result = tensors[at]
            rest = (*tensors[self.b + 1 : at], *tensors[at + 1 :])
            if self.overlaps(result, a, b) or any(share_memory(result, x) for x in rest):
                raise ValueError("out shares memory with an input")
        if self.amax is not None:
            amax = tensors[self.amax]
            inputs = (x for i, x in enumerate(tensors) if i not in (at, self.amax))
            if any(share_memory(amax, x) for x in inputs):
                raise ValueError("amax shares memory with an input")
        out, function = result, self.function
        if self.flattened:
            a, out = a.view(-1, a.shape[-1]), out.view(-1, out.shape[-1])
        passed = [self._argument(name, tensors, out) for name in self.names]
        function(a, b, out, *passed)
        return result

    def _argument(self, name: str, tensors: tuple[Tensor, ...], out: Tensor) -> Any:
        """What is passed under that name, beside a, b and out."""
        place = self.places.get(name)
        if place is not None:
            x = tensors[place]
            if name in self.flat:
                return x.view(-1)
            return x.view(-1, x.shape[-1]) if self.flattened and name == "residual" else x
        if name == "c":
            return out.clone() if self.copies_out else out
        return self.numbers[name]
