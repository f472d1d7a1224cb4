"""`cutex.tune`: a call of matmul, or a kernel of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from cutex.ops.matmul.tuned_call import tune as tune_matmul

if TYPE_CHECKING:
    from cutex.bench.kernel_tuner import TunedKernel
    from cutex.kernels.gemm.config import GemmConfig


@overload
def tune(a: Tensor, b: Tensor, /, *, seconds: float = ..., **options: Any) -> GemmConfig: ...


@overload
def tune(
    kernel: Callable[..., Any],
    /,
    *arguments: Any,
    over: Mapping[str, Sequence[Any]],
    check: Callable[..., Any] | None = None,
    gpu: str = "",
) -> TunedKernel: ...


def tune(what: Any, /, *arguments: Any, **options: Any) -> Any:
    """Choose by time the tiles of a call of `cutex.matmul`, or the constants of a kernel.

    tune(a, b, seconds=3.0, **options): this call of matmul, which takes the same options, in at
        most `seconds`. Returns the tiles that it and calls like it then take; calls that were tuned
        before are not tuned again. Raises what matmul raises, and ValueError for a call that
        launches nothing.

    tune(kernel, *arguments, over={"tile": [64, 128], ...}, check=None, gpu=""): a @cute.jit
        function of your own, with its arguments but for the constants (cutlass.Constexpr) in
        `over`, of which every combination is compiled, checked and timed: on the GPU that holds the
        tensors, with a cold L2; for tensors on the CPU by the simulator's clock, for `gpu` (as
        "b200"; by default "h200"), which docs/time.md describes. Kernels run on the given tensors
        themselves; without a GPU only the blocks that are timed run, unless there is a check.
        check: a function of the arguments but for constants that returns False or raises
            AssertionError where the result is wrong; such a variant, and one that does not compile
            or run, is left out.
        Returns a TunedKernel: `choice`, the fastest values; `variants`, all with their
        microseconds; printed, a table; called, it launches the choice. What was found is kept, as
        for matmul, until the function, the layouts, the values or the GPU change. Raises TypeError
        or ValueError for arguments that the function does not take, and where no variant runs.
    """
    if isinstance(what, Tensor) or not callable(what):
        return tune_matmul(what, *arguments, **options)
    from cutex.bench.kernel_tuner import tune_kernel

    unknown = set(options) - {"over", "check", "gpu"}
    if unknown or "over" not in options:
        said = f"no {', '.join(sorted(unknown))}" if unknown else "over, the values to choose among"
        raise TypeError(f"tuning a kernel takes {said}")
    return tune_kernel(what, arguments, **options)
