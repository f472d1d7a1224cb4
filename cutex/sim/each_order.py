"""python -m cutex.sim.each_order FOLDER N: run a script in many orders, for `cutex.check`.

Importing torch and the DSL takes most of the time of a small script. Here that is done once, and
each run is a fork of this process, at most N at a time. FOLDER/runs.json is a list of runs, each
the arguments of `python -m cutex.sim`; the output of run i goes to FOLDER/i.txt, and a line "i
exit-code" to standard output when it has ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cutex.sim.__main__ import NO_DISK_CACHES, main, parser


def fork_each(folder: Path, at_once: int, runs: Sequence[Sequence[str]]) -> int:
    """Fork the runs; return each run's exit code in its process, and 0 in the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runs end, and this process after the last
    running: dict[int, int] = {}  # process: number of its run
    for number, arguments in enumerate(runs):
        while len(running) >= at_once:
            _tell_end(running)
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _print_to(folder / f"{number}.txt")
            return main(arguments)
        running[process] = number
    while running:
        _tell_end(running)
    return 0


def _print_to(file: Path) -> None:
    """Redirect all further output of this process to ``file``."""
    told = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(told, sys.stdout.fileno())
    os.dup2(told, sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())


def _tell_end(running: dict[int, int]) -> None:
    """Wait for one run to end, and print its number and exit code."""
    process, status = os.wait()
    print(running.pop(process), os.waitstatus_to_exitcode(status), flush=True)


def _import_once(arch: str) -> None:
    """Import the modules that every run needs, with the environment set before."""
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ.update(NO_DISK_CACHES)
    with suppress(Exception):  # each run reports it
        import cutex.sim.host.dsl_stand_in
        import cutex.sim.host.torch_stand_in  # noqa: F401
    gc.collect()
    gc.freeze()  # objects that are not visited again stay shared


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    wanted = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    _import_once(parser().parse_args(wanted[0]).arch)
    raise SystemExit(fork_each(folder, int(sys.argv[2]), wanted))
