"""torch's profilers in a script without a GPU: they record what the CPU does.

Asked for a GPU's activity, torch's own would look for CUPTI or refuse. Events have the fields of a
GPU's (`device_time_total` and the like), which are 0: times are predicted by --time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.profiler import ProfilerActivity


def of_activities(init: Callable[..., None]) -> Callable[..., None]:
    """``torch.profiler._KinetoProfile.__init__``: a GPU's activity is the CPU's."""

    @wraps(init)
    def without_gpu(self: Any, *, activities: Any = None, **how: Any) -> None:
        if activities is not None:
            asked = dict.fromkeys(
                ProfilerActivity.CPU if a is ProfilerActivity.CUDA else a for a in activities
            )
            activities = list(asked)
        init(self, activities=activities, **how)

    return without_gpu


def of_devices(init: Callable[..., None]) -> Callable[..., None]:
    """``torch.autograd.profiler.profile.__init__``: on no device but the CPU."""

    @wraps(init)
    def without_gpu(self: Any, enabled: bool = True, **how: Any) -> None:
        how.pop("use_cuda", None)
        how["use_device"] = None
        init(self, enabled, **{**how, "use_cpu": True})

    return without_gpu
