"""Where no unit binds, the clock says what a launch's time consists of."""

from __future__ import annotations

from cutex.sim.timing.chain import chain
from cutex.sim.timing.units import Interval


def test_a_chain_follows_waits_and_units_to_who_started_them():
    """LOAD works 100, TMA takes 700, MMA wakes 90 later and works 50, and nothing else counts."""
    found = chain(
        [
            Interval("load 1", "", 0, 100, "work"),
            Interval("TMA in", "box", 110, 800, "unit", 0, ("load 1", 100)),
            Interval("load 1", "", 120, 300, "work"),
            Interval("mma 0", "TMA", 20, 890, "wait", 0, ("TMA in", 800)),
            Interval("mma 0", "", 890, 940, "work"),
            Interval("mma 0", "", 890, 9000, "work", 1),
        ]
    )
    assert found == {"TMA loads": 700, "load": 100, "wakes": 90, "mma": 50}
    assert list(found) == ["TMA loads", "load", "wakes", "mma"]


def test_waits_of_a_known_length_and_cycles_without_an_interval_are_of_the_chain():
    found = chain(
        [
            Interval("store 0", "", 0, 10, "work"),
            Interval("store 0", "TMA store", 30, 530, "wait"),
        ]
    )
    assert found == {"TMA store": 500, "store": 30}
    assert chain([]) == {}
