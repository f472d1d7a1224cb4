"""The threads that share a row, and what each of them holds of it. Loads no DSL."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
VECTOR_BYTES = 16  # the widest load and store of a thread
LINE_BYTES = 128  # of memory, and of smem as bulk copies write it


def slot_bytes(num_bytes: int) -> int:
    """The size of a slot of smem for runs of at most so many bytes, which begin in it as far behind
    a line as in memory, and of which 16 bytes at each end are others', too."""
    return -(-(num_bytes + LINE_BYTES + VECTOR_BYTES) // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True)
class RowTile:
    """Rows of one CTA, or of a cluster whose CTAs share a row, kept whole in registers.

    The vectors of a row go round: one to each of its threads, CTA by CTA, then again from the
    first thread, so that neighbouring lanes load neighbouring vectors.
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
        """The longest row that the tile holds."""
        return self.threads * self.ctas * self.vectors * self.width - self.lead

    @property
    def least_columns(self) -> int:
        """The shortest row that the tile takes: with `inner` vectors that are all of the row."""
        return self.threads * self.ctas * (self.vectors - 2) * self.width if self.inner else 0

    @property
    def lead(self) -> int:
        """The elements of the first vector that may lie before a row."""
        return 0 if self.aligned else self.width - 1

    def why_not(self, clusters: bool = True) -> str | None:
        """The reason why there is no such tile, or none on an arch without `clusters`; None if
        there is."""
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
