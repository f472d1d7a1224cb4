"""The replies of rented GPUs: printed, recorded and added up as they arrive."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cutex.bench import cli
from cutex.cloud.calls import STARTUP_LIMIT, Plan
from cutex.cloud.prices import Rental
from cutex.command import print_nowhere
from cutex.results import Result, parse
from cutex.results import sweep as sweeps
from cutex.results.recorder import Recorder

Reply = dict[str, Any] | BaseException


class Ledger:
    """The replies that have arrived: printed, recorded, and added up.

    Each is handled on its own: an error in one reply, or in writing it down, affects no other.
    """

    def __init__(self, made: Plan, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.made, self.say = made, say
        self.as_json = args.json
        self.recorder = Recorder(Path(args.out))
        self.compare = next((r.options["compare"] for r in made.requests if r.options), ())
        self.lines: cli.Lines | None = None
        self.seconds = dict.fromkeys((r.gpu for r in made.rentals), 0.0)
        self.since = dict.fromkeys(self.seconds, time.monotonic())  # the last reply of each GPU
        self.answered: set[int] = set()  # indices of requests
        self.failed = 0  # calls that ended in an exception
        self.swept: set[tuple[Path, tuple[str, bool, bool]]] = set()  # files, and kinds of rows
        self.code = 0

    def take(self, rental: Rental, reply: Reply) -> None:
        if isinstance(reply, BaseException):
            self._fails()
            self.failed += 1
            # NOTE: a failed call ran, and is paid for, since the reply before it, at most for its
            # time limits
            most = STARTUP_LIMIT + self.made.limit(rental)
            self.seconds[rental.gpu] += min(time.monotonic() - self.since[rental.gpu], most)
            self._arrived(rental)
            print(f"cutex: a call on {rental.gpu} failed: {_sentence(reply)}", file=sys.stderr)
            traceback.print_exception(reply, file=sys.stderr)
            return
        self._arrived(rental)
        try:
            index, seconds = _stamp(reply, self.made)
        except ValueError as error:
            self._foreign(reply, error)
            if not isinstance(reply, dict):
                return
            index, seconds = -1, 0.0
        again = index in self.answered
        self.answered.add(index)
        if not again:  # NOTE: a reply may be delivered twice, and is paid for once
            self.seconds[rental.gpu] += seconds
        with self._apart(reply):
            for notice in reply.get("notices", ()):
                print(f"cutex: {notice}", file=sys.stderr)
        self._take_rows(rental, reply, seconds)
        if "layers" in reply and not again:
            self._take_layers(reply)
        if "probes" in reply:
            self._take_probes(reply["probes"])
        if "junit" in reply:
            self._take_junit(reply)
        if "script" in reply:
            with self._apart(reply):
                self._take_script(reply)

    def _arrived(self, rental: Rental) -> None:
        self.since[rental.gpu] = time.monotonic()

    def account(self) -> None:
        """Print at the end the sweeps, the cost, the missing replies, and the errors."""
        for file in sorted({file for file, _ in self.swept}):
            found = [r for r in sweeps.read(file) if (file, _kind(r)) in self.swept]
            self.say(sweeps.text_by_device(found))
        for rental in self.made.rentals:
            spent = self.seconds[rental.gpu]
            summary = f"{rental.gpu}: {spent:.0f} s measured, about ${rental.usd(spent):.2f}"
            self.say(summary + self._cut_off(rental))
        missing = len(self.made.requests) - len(self.answered - {-1}) - self.failed
        if missing > 0:
            self._fails()
            print(f"cutex: {missing} of {len(self.made.requests)} calls were not answered",
                  file=sys.stderr)  # fmt: skip
        for sentence in self.recorder.summary():
            self._fails()
            print(f"cutex: {sentence}", file=sys.stderr)

    def _cut_off(self, rental: Rental) -> str:
        """What the calls may have cost that were still running, as when a user interrupts them."""
        running = [r for r in self.made.on(rental.gpu) if r.index not in self.answered]
        if not running or self.failed:
            return ""
        most = STARTUP_LIMIT + self.made.limit(rental)
        more = min(time.monotonic() - self.since[rental.gpu], most)
        calls = "1 call" if len(running) == 1 else f"{len(running)} calls"
        return f"; {calls} cut off, {more:.0f} s or ${rental.usd(more):.2f} more at most"

    def _fails(self, code: int = 1) -> None:
        self.code = self.code or code

    def _foreign(self, what: object, error: Exception) -> None:
        self._fails()
        self.recorder.foreign(what, error)

    @contextmanager
    def _apart(self, what: object) -> Iterator[None]:
        """A context in which an error affects only `what`, which is kept in a rescue file."""
        try:
            yield
        except OSError:  # NOTE: standard output is closed; the reply is recorded all the same
            print_nowhere()
        except Exception as error:
            self._foreign(what, error)

    def _take_rows(self, rental: Rental, reply: dict[str, Any], seconds: float) -> None:
        rows: list[Result] = []
        lines = reply.get("results", [])
        for line in lines if isinstance(lines, list) else [lines]:
            with self._apart(line):
                if not isinstance(line, str):
                    raise ValueError(f"{type(line).__name__} where a row belongs")
                rows.append(parse(line))
        for row in rows:
            row = replace(row, cost_usd=rental.usd(seconds) / len(rows))
            with self._apart(row.to_json()):
                self.lines = self.lines or cli.Lines(row.device, self.compare, self.as_json)
                self.lines.result(row)
            self.recorder.row(row)
            if not row.ok:
                self._fails()
        if rows and self.lines is not None:
            with self._apart(rows[-1].to_json()):
                self.lines.peers(rows[-1])

    def _take_layers(self, reply: dict[str, Any]) -> None:
        """Append rows of python -m cutex.sweep to its files."""
        for line in reply["layers"]:
            with self._apart(line):
                row = sweeps.SweepRow.from_json(line)
                file = sweeps.file_of(self.recorder.folder, row.device_name)
                self.recorder.attempt("sweep", partial(sweeps.append, file, row), line)
                self.swept.add((file, _kind(row)))
                if not row.ok:
                    self._fails()
                if self.as_json:
                    print(line, flush=True)
                ratio = f"{row.ratio:.3f}x" if row.ratio else f"{row.us} us"
                self.say(f"{row.device_name}: {row.name}: {ratio if row.ok else row.message}")
        with self._apart(reply):
            self._fails(int(reply["code"]))

    def _take_probes(self, found: list[dict[str, Any]]) -> None:
        from cutex.bench import probes

        out, when = self.recorder.folder, self.made.requests[0].run
        with self._apart(found):
            self.say(probes.table(found))
            if not all(row["ok"] for row in found):
                self._fails()
        self.recorder.attempt("probes", lambda: probes.record(found, when, out), found)

    def _take_script(self, reply: dict[str, Any]) -> None:
        said, code = reply["script"], int(reply["code"])
        sys.stderr.write(str(said["stderr"]))
        sys.stdout.write(str(said["stdout"]))
        sys.stdout.flush()
        self.say(f"exit code {code}")
        if code:
            self._fails(code)

    def _take_junit(self, reply: dict[str, Any]) -> None:
        with self._apart(reply):
            self._fails(int(reply["code"]))
        junit = reply["junit"]
        if not junit:
            self.say("pytest wrote no report")
            return
        name = f"junit-{self.made.requests[0].run[:19].replace(':', '')}.xml"
        path = self.recorder.folder / name
        self.recorder.attempt(
            "junit", lambda: path.write_text(junit, errors="replace", encoding="utf-8"), junit
        )
        self.say(f"pytest's report is in {path}")


def _stamp(reply: object, made: Plan) -> tuple[int, float]:
    """The index of the request that `reply` answers, and the seconds that it took."""
    if not isinstance(reply, dict):
        raise ValueError(f"{type(reply).__name__} where a dict belongs")
    index, seconds = reply.get("index"), reply.get("seconds")
    if type(index) is not int or index not in {r.index for r in made.requests}:
        raise ValueError(f"it answers request {index!r}, which was not asked")
    if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ValueError(f"it took {seconds!r} seconds")
    return index, float(seconds)


def _kind(row: sweeps.SweepRow) -> tuple[str, bool, bool]:
    """The properties that rows of one summary share."""
    return row.dtype, row.fits, row.tuned


def _sentence(error: BaseException) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
