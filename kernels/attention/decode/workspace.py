"""The memory that parts of units need, from a launch's sizes; a kernel called directly without it
is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cutex.compile import Bound, Workspace
from cutex.kernels.attention.decode.config import WORDS
from cutex.kernels.attention.decode.splits import Splits

Numbers = Mapping[str, int]  # sizes, and whole numbers, of a launch's arguments


def needed(config: Any, units: int, num_splits: int) -> Workspace:
    """The number of values that a kernel writes for this many units, each cut into `num_splits`
    parts; 0: where shares end. A unit that is not cut needs none."""
    if config.parts == "even":
        num_splits = max(config.ctas // max(units, 1), 1)
    is_cut = not config.whole and config.parts != "one" and num_splits != 1
    slots = Splits.slots(config.ctas, units, num_splits) if is_cut else 0
    words = WORDS * units if config.combined else 0
    flags = units * config.flags_of_unit if is_cut and not config.combined else 0
    return Workspace(words + slots * config.tile_m * (config.head_dim_v + 1), flags)


def bounds_of(
    config: Any, units_of: Callable[[Any, Numbers], int], name: str
) -> Callable[[Numbers], tuple[Bound, ...]]:
    """The bound of the workspace's vector `name`, sums or flags, by the numbers of a launch."""

    def bounds(numbers: Numbers) -> tuple[Bound, ...]:
        found = needed(config, units_of(config, numbers), numbers["num_splits"])
        return (Bound(name, max(getattr(found, name), 1)),)

    return bounds
