"""python -m cutex.sim.each_order FOLDER N: run a script in many orders, for `cutex.check`.

Importing torch and the DSL and compiling kernels take most of the time of a small script. Here that
is done once: the script runs up to its first launch, and each order is a fork of the process from
there, at most N at a time. (What a script compiles after its first launch, each order compiles.)
FOLDER/runs.json is a list of runs, each the arguments of `python -m cutex.sim`, which differ in the
order, the seed and what is written where; the output of run i goes to FOLDER/i.txt, and a line "i
exit-code" to standard output when it has ended. A script that launches nothing is run 0 alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutex.command import refuse
from cutex.sim.__main__ import NO_DISK_CACHES, main, parser

if TYPE_CHECKING:
    from cutex.sim.host.calls import Calls


class EachOrder:
    """The runs, of which one is this process until it forks, and then in each fork another."""

    def __init__(self, folder: Path, at_once: int, runs: Sequence[Sequence[str]]) -> None:
        self.folder, self.at_once, self.runs = folder, at_once, runs
        self.ended = os.dup(sys.stdout.fileno())  # where ends are printed
        self.running: dict[int, int] = {}  # process: number of its run
        self.number = 0
        self.forked = False
        self.kept: list[Any] = []  # what no fork may clean up, as the others need it

    def run(self) -> int:
        """Run the script; returns its exit code, in each fork that of one run."""
        _print_to(self.folder / "0.txt")
        code = main(self.runs[0], self.split)
        sys.stdout.flush()
        sys.stderr.flush()
        if not self.forked:
            self._tell(0, code)
        return code

    def split(self, options: argparse.Namespace, calls: Calls) -> None:
        """Continue with every run in a fork of its own; returns only there."""
        from cutlass.base_dsl.dsl import BaseDSL

        self.forked = True
        sys.stdout.flush()
        sys.stderr.flush()
        until_here = (self.folder / "0.txt").read_bytes()
        gc.collect()
        gc.freeze()  # objects that are not visited again stay shared
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process ends after the last run
        for number, arguments in enumerate(self.runs):
            while len(self.running) >= self.at_once:
                self._wait()
            process = os.fork()
            if process == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self.kept.append(BaseDSL._func)  # the compiler, with its folder
                if number:
                    _print_to(self.folder / f"{number}.txt", until_here)
                wanted = parser().parse_args(arguments)
                options.json, options.order, options.seed = wanted.json, wanted.order, wanted.seed
                calls.order, calls.seed = wanted.order, wanted.seed
                calls.resources = wanted.resources
                return
            self.running[process] = number
        while self.running:
            self._wait()
        os._exit(0)

    def _wait(self) -> None:
        """Wait for one run to end, and tell its number and exit code."""
        process, status = os.wait()
        if process in self.running:  # else a process of the script's own
            self._tell(self.running.pop(process), os.waitstatus_to_exitcode(status))

    def _tell(self, number: int, code: int) -> None:
        os.write(self.ended, f"{number} {code}\n".encode())


def _print_to(file: Path, begin: bytes = b"") -> None:
    """Redirect all further output of this process to ``file``, which begins with ``begin``."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(log, begin)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())


def _import_once(arch: str) -> None:
    """Import the modules that every run needs, with the environment set before."""
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork, and runs share the cores
    os.environ.update(NO_DISK_CACHES)
    with suppress(Exception):  # each run reports it
        import torch

        torch.set_num_threads(1)
        import cutex.sim.host.dsl_stand_in
        import cutex.sim.host.torch_stand_in  # noqa: F401


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[1], "runs.json").is_file():
        raise SystemExit(refuse("python -m cutex.check starts this, with FOLDER and N"))
    folder = Path(sys.argv[1])
    wanted = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    _import_once(parser().parse_args(wanted[0]).arch)
    each = EachOrder(folder, int(sys.argv[2]), wanted)
    code = each.run()
    if each.forked:
        os._exit(code)  # NOTE: without what cleans up behind an interpreter: others go on
    raise SystemExit(code)
