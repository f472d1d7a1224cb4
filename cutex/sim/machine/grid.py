"""The warps and CTAs of a grid: their numbers, coordinates and names.

Warps are numbered ``warp * num_ctas + cta``: the same warp of all resident CTAs is a contiguous
range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutex.sim.host.capture import Launch


class Grid:
    """The dimensions of a launch (``dims`` in CTAs), and its resident clusters."""

    def __init__(self, launch: Launch, num_ctas: int) -> None:
        self.dims: tuple[int, int, int] = launch.grid
        self.block: tuple[int, int, int] = launch.block
        self.cluster: tuple[int, int, int] = launch.cluster
        self.num_threads, self.warps_per_cta = launch.num_threads, launch.warps_per_cta
        self.cluster_size = launch.cluster_size
        self.num_ctas = num_ctas
        self.num_warps = num_ctas * self.warps_per_cta
        warps = np.arange(self.num_warps)
        self.warp_cta = warps % num_ctas
        self.warp_in_cta = warps // num_ctas
        self.cta_rank = np.arange(num_ctas) % self.cluster_size
        # by warp: the first CTA of its cluster
        self.first_cta: list[int] = (self.warp_cta - self.cta_rank[self.warp_cta]).tolist()
        self.place([])

    def place(self, clusters: Sequence[int]) -> None:
        """Make these clusters of the grid (numbered by x, then y, then z) resident."""
        self.present = count = len(clusters) * self.cluster_size
        self._warp_names: dict[int, str] = {}
        assert count <= self.num_ctas
        self.cta_coord = np.zeros((self.num_ctas, 3), np.uint32)
        self.cta_cluster = np.zeros(self.num_ctas, np.int64)  # its number in the grid
        for i in range(count):
            which, rank = divmod(i, self.cluster_size)
            self.cta_coord[i] = self.coordinates(clusters[which] * self.cluster_size + rank)
            self.cta_cluster[i] = clusters[which]

    def threads(self) -> np.ndarray:
        """The lanes, (warps, 32), that the launch has in the resident CTAs."""
        threads = self.warp_in_cta[:, None] * 32 + np.arange(32)
        return (threads < self.num_threads) & (self.warp_cta[:, None] < self.present)

    def coordinates(self, linear: int) -> tuple[int, int, int]:
        """The grid coordinates of the ``linear``-th CTA in cluster order: clusters by x, y, z, and
        ranks within them likewise.
        """
        cx, cy, cz = self.cluster
        gx, gy = self.dims[0] // cx, self.dims[1] // cy
        which, rank = divmod(linear, self.cluster_size)
        x, y, z = which % gx, which // gx % gy, which // (gx * gy)
        rx, ry, rz = rank % cx, rank // cx % cy, rank // (cx * cy)
        return x * cx + rx, y * cy + ry, z * cz + rz

    def shared_location(
        self, warps: np.ndarray, addresses: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The (cta, byte offset) of shared-window addresses (rank in bits 24 and up), for each of
        ``warps``.
        """
        own = self.warp_cta[warps]
        rank = (addresses >> np.uint64(24)).astype(np.int64)
        return own - self.cta_rank[own] + rank, (addresses & np.uint64(0xFFFFFF)).astype(np.int64)

    def cta_of(self, warp: int) -> int:
        return warp % self.num_ctas

    def name_warp(self, warp: int) -> str:
        name = self._warp_names.get(warp)
        if name is None:
            cta = int(self.warp_cta[warp])
            x, y, z = self.cta_coord[cta]
            rank = f" (rank {self.cta_rank[cta]} of its cluster)" if self.cluster_size > 1 else ""
            name = f"CTA ({x},{y},{z}){rank} warp {self.warp_in_cta[warp]}"
            self._warp_names[warp] = name
        return name

    def name_cta(self, cta: int) -> str:
        x, y, z = self.cta_coord[cta]
        return f"CTA ({x},{y},{z})"
