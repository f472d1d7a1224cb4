"""The clusters of a grid that have not started."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class PendingClusters:
    """The clusters in launch order; taken from the front by the launch itself or by cluster launch
    control.
    """

    def __init__(self, clusters: Sequence[int]) -> None:
        self.clusters = deque(clusters)

    def start(self, count: int) -> list[int]:
        """The next ``count`` clusters (fewer if fewer are left), which now start."""
        return [self.clusters.popleft() for _ in range(min(count, len(self.clusters)))]

    def __len__(self) -> int:
        return len(self.clusters)
