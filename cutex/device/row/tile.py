"""The threads that share a row, and the elements that each of them holds. Does not import the
DSL."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
VECTOR_BYTES = 16  # the widest load and store of a thread
LINE_BYTES = 128  # of memory, and of smem as bulk copies write it


def slot_bytes(num_bytes: int) -> int:
    """The bytes of a smem slot for runs of at most this many bytes: a run keeps its gmem offset
    from a 128-byte line, and up to 16 bytes at each end belong to neighbours."""
    return -(-(num_bytes + LINE_BYTES + VECTOR_BYTES) // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True)
class RowTile:
    """Rows held whole in registers by one CTA, or by a cluster whose CTAs share a row.

    The vectors of a row are dealt out round-robin: one to each thread, CTA by CTA, then again from
    the first thread, so that neighbouring lanes load neighbouring vectors.
    """

    rows: int = 1  # rows of a CTA at one time
    threads: int = 128  # threads of a CTA that share a row; a power of two
    ctas: int = 1  # CTAs of a cluster that share a row
    vectors: int = 1  # vectors of a row in one thread
    width: int = 8  # elements of a vector
    # whether all rows begin at a multiple of a vector, and are a whole number of them; if not, the
    # first and the last vector of a row are loaded and stored by the element
    aligned: bool = True
    # of rows that begin anywhere: whether an end of a row can only lie in the first vector of a
    # thread or in its last two, because no tile with fewer vectors would hold them
    inner: bool = False

    @property
    def num_threads(self) -> int:
        """The threads of a CTA."""
        return self.rows * self.threads

    @property
    def warps(self) -> int:
        """The warps of a CTA that share a row; 0 if several rows share a warp."""
        return self.threads // WARP

    @property
    def columns(self) -> int:
        """The columns of the longest row that fits."""
        return self.threads * self.ctas * self.vectors * self.width - self.lead

    @property
    def least_columns(self) -> int:
        """The columns of the shortest row allowed: `inner` vectors must be entirely inside the
        row."""
        return self.threads * self.ctas * (self.vectors - 2) * self.width if self.inner else 0

    @property
    def lead(self) -> int:
        """The elements of the first vector that may be before the row's start."""
        return 0 if self.aligned else self.width - 1

    def why_not(self, clusters: bool = True) -> str | None:
        """Why this tile is invalid, or unavailable on an arch without `clusters`; None if it is
        valid."""
        if self.threads & (self.threads - 1) or not 1 <= self.threads <= 1024:
            return f"threads={self.threads} must be a power of two up to 1024"
        if self.num_threads % WARP or self.num_threads > 1024:
            return f"rows={self.rows} of {self.threads} threads must be whole warps, at most 1024"
        if self.ctas > 1 and self.threads < WARP:
            return f"ctas={self.ctas}: a row of several CTAs needs whole warps of each"
        if self.inner and self.threads * self.ctas == 1:
            return "inner: a row of one thread may begin and end in any of its vectors"
        if self.ctas not in (1, 2, 4, 8, 16):
            return f"ctas={self.ctas} must be 1, 2, 4, 8 or 16"
        if self.ctas > 1 and not clusters:
            return f"ctas={self.ctas}: the arch has no clusters"
        return None
