"""The GPUs that Modal rents, by name, and their prices.

Rates change: these are of the date below, `--rate B200=6.25` overrides one, and `modal billing
rates` gives today's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

AS_OF = "2026-06"  # modal.com/pricing
CORES, GIB = 4, 32  # CPU cores and memory of a container
USD_PER_CORE_HOUR, USD_PER_GIB_HOUR = 0.047, 0.008


@dataclass(frozen=True)
class Rental:
    """A GPU by the name that Modal rents it under; the container's cores and memory cost extra."""

    gpu: str
    arch: str
    usd_per_hour: float  # price of the GPU alone

    @property
    def usd_per_second(self) -> float:
        """The price in dollars per second of the GPU, the cores and the memory of a container."""
        beside = CORES * USD_PER_CORE_HOUR + GIB * USD_PER_GIB_HOUR
        return (self.usd_per_hour + beside) / 3600

    def usd(self, seconds: float) -> float:
        return seconds * self.usd_per_second


RENTALS = {
    rental.gpu: rental
    for rental in (
        Rental("B200", "sm_100a", 6.25),
        Rental("H200", "sm_90a", 4.54),
        Rental("H100!", "sm_90a", 3.95),
    )
}
INEXACT = {  # names for which Modal may give one of several GPUs
    "H100": "may be answered with an H200; take H100! or H200",
    "B200+": "may be answered with a B300; take B200",
}


def rental(name: str) -> Rental:
    """The rental of a GPU by Modal's name, in upper or lower case.

    ValueError, in one sentence, for another name, and for one for which Modal may give another GPU.
    """
    gpu = name.strip().upper()
    if gpu in INEXACT:
        raise ValueError(f"--gpu {name!r} {INEXACT[gpu]}")
    try:
        return RENTALS[gpu]
    except KeyError:
        raise ValueError(f"--gpu {name!r} is not one of {', '.join(RENTALS)}") from None


def overridden(rentals: list[Rental], rates: list[str]) -> list[Rental]:
    """`rentals` with the rates that options such as B200=6.25 (dollars an hour) give."""
    given: dict[str, float] = {}
    for text in rates:
        gpu, _, rate = text.partition("=")
        try:
            given[rental(gpu).gpu] = usd = float(rate)
        except ValueError:
            raise ValueError(f"--rate {text!r}: GPU=dollars per hour is needed") from None
        if not 0 <= usd < float("inf"):
            raise ValueError(f"--rate {text!r}: GPU=dollars per hour is needed")
    return [replace(r, usd_per_hour=given.get(r.gpu, r.usd_per_hour)) for r in rentals]
