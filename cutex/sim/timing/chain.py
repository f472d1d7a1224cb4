"""What a launch's time consists of where no unit binds: its longest chain, followed backwards.

From the end of the warp that ends last: what it works is part of the chain; a wait is followed to
whoever ended it, and what TMA or the tensor core took to the warp that started it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from cutex.sim.timing.units import Interval

BINDS = 0.5  # share of the time for which a unit is busy that binds
UNITS = {"TMA in": "TMA loads", "TMA out": "TMA stores", "tensor core": "tensor core"}


def chain(intervals: Iterable[Interval]) -> dict[str, float]:
    """The cycles of the first CTA's longest chain, by what they are: work of a role, a unit's, or
    `wakes`, from an arrival until the waiter goes on. The most come first."""
    tracks: dict[str, list[Interval]] = defaultdict(list)
    for i in sorted(intervals, key=lambda i: i.start):
        if i.cta == 0:
            tracks[i.track].append(i)
    starts = {track: [i.start for i in found] for track, found in tracks.items()}
    ends = {track: max(i.end for i in found) for track, found in tracks.items()}
    warps = {track: end for track, end in ends.items() if track not in UNITS}
    found: dict[str, float] = defaultdict(float)
    if not warps:
        return {}
    track = max(warps, key=warps.__getitem__)
    now = ends[track]
    for _ in range(2 * sum(map(len, tracks.values()))):
        at = bisect_left(starts.get(track, []), now) - 1
        if at < 0:
            found[_works(track)] += now
            break
        one = tracks[track][at]
        if one.end < now:  # nothing is recorded of the time since: what an instruction takes
            found[_works(track)] += now - one.end
            now = one.end
        if one.by is None:
            found[one.name if one.kind == "wait" else _works(track)] += now - one.start
            now = one.start
        else:
            found["wakes" if one.kind == "wait" else UNITS[track]] += now - min(now, one.by[1])
            track, now = one.by[0], min(now, one.by[1])
    return dict(sorted(found.items(), key=lambda x: -x[1]))


def _works(track: str) -> str:
    """What a track's own cycles are called: the role's of a warp, or the unit's."""
    return UNITS.get(track, track.rpartition(" ")[0])
