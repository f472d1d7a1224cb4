"""The output of a run: a table with a line for each result, or JSON lines."""

from __future__ import annotations

import sys

from cutex.bench.run import NOTE
from cutex.results import Result, Timing, gbs
from cutex.results.rate import rate

COMMON = (("stage", -8), ("arch", -8), ("device", -12), ("problem", -34),
          ("ok", -5), ("max error", 9), ("tolerance", 9))  # fmt: skip
TIMED = (
    ("time us", 10),
    ("p20-p80", 19),
    ("cache", 5),
    ("launch us", 9),
    ("GB/s", 7),
    ("TFLOPS", 7),
    ("% peak", 6),
)
SIMULATED = (("orders", 6), ("time s", 8), ("TFLOPS", -15))
# transactions of lanes: 32 bytes of global memory; 128 bytes of smem, and without a bank conflict
COUNTED = {"sectors": "sectors", "wavefronts": "wavefronts", "least": "least_wavefronts"}


class Lines:
    """The output of a run: a header with units, then one line per result, coloured on a terminal;
    or JSON lines."""

    def __init__(
        self, device: str, peers: tuple[str, ...], as_json: bool, counts: bool = False
    ) -> None:
        timed = (*TIMED, *((f"x {name}", max(8, len(name) + 2)) for name in peers))
        counted = tuple((title, 10) for title in COUNTED) if counts else ()
        simulated = (*SIMULATED[:2], *counted, SIMULATED[2])
        self.columns = (*COMMON, *(simulated if device == "sim" else timed))
        self.compare = peers
        self.as_json = as_json
        self.headed = False

    def result(self, result: Result) -> None:
        if self.as_json:
            print(result.to_json(), flush=True)
            return
        bounds = ["" if x is None else f"{x:.3g}" for x in (result.max_error, result.tolerance)]
        cells = [*self._what(str(result.stage), result), "ok" if result.ok else "WRONG", *bounds]
        if result.device == "sim":
            orders = str(len(result.sim_orders))
            counts = result.sim_counts or {}
            counted = [str(counts[name]) for name in COUNTED.values()] if counts else []
            cells += [orders, f"{result.sim_seconds:.2f}", *counted, "none: simulated"]
        elif result.timing is not None:
            cells += self._timed(result, result.timing)
            cells += [_ratio(result.ratio(name)) for name in self.compare]
        self._line(cells, style=None if result.ok else "red")
        if not result.ok:
            print(result.message, file=sys.stderr)
        elif note := result.message.partition(NOTE)[2]:
            self.note(f"stage {result.stage}: {note}")

    def peers(self, result: Result) -> None:
        for peer in () if self.as_json else result.peers:
            self._line(
                [*self._what(peer.name, result), "", "", "", *self._timed(result, peer.timing)]
            )

    def note(self, text: str) -> None:
        self._print(text, style="dim")

    def _what(self, stage: str, result: Result) -> list[str]:
        problem = result.problem
        kind = f"{result.size} {problem['dtype']} {problem['init']}"
        return [stage, result.arch, result.device_name, kind]

    def _timed(self, result: Result, took: Timing) -> list[str]:
        problem = result.case
        found = rate(problem, result.arch, took.median_us)
        return [
            f"{took.median_us:.1f}",
            f"{took.p20_us:.1f}-{took.p80_us:.1f}",
            took.cache_state,
            f"{took.launch_us:.1f}",
            f"{gbs(problem.bytes, took.median_us):.0f}",
            "-" if found.by_memory else f"{found.value:.1f}",
            f"{found.percent:.1f}",
        ]

    def _line(self, cells: list[str], style: str | None = None) -> None:
        if not self.headed:
            self._print(self._align([title for title, _ in self.columns]), style="bold")
            self.headed = True
        self._print(self._align(cells), style)

    def _align(self, cells: list[str]) -> str:
        padded = (
            cell.ljust(-width) if width < 0 else cell.rjust(width)
            for cell, (_, width) in zip(cells, self.columns, strict=False)
        )
        return "  ".join(padded).rstrip()

    def _print(self, text: str, style: str | None = None) -> None:
        if not sys.stdout.isatty():
            print(text, flush=True)
            return
        from rich.console import Console

        Console(soft_wrap=True).print(text, style=style, markup=False, highlight=False)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
