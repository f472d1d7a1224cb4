"""python -m cutex.sim script.py: run a script that needs a GPU in the simulator instead.

The script is not changed. Its "cuda" tensors are in host memory, its CuTe DSL kernels are compiled
for the arch that it sees, and its launches are simulated: every warp, barrier, copy and MMA. Exit
codes: the script's own; 1 for a finding or an error of the simulator; 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from cutex.arch import KNOWN, arch
from cutex.command import INTERRUPTED, Parser, answered, print_nowhere, refuse, writable
from cutex.errors import Missing
from cutex.orders import MOST_JOBS, add_order
from cutex.whole_file import write_whole

if TYPE_CHECKING:
    from cutex.sim.host.calls import Calls

# Libraries that keep compiled kernels on disk and load them from there, past the simulator.
NO_DISK_CACHES = {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
INTERPRETED = {"TRITON_INTERPRET": "1"}  # Triton kernels of the script run on the CPU


def parser() -> Parser:
    out = Parser(
        prog="python -m cutex.sim",
        description="Run a script that asks for a GPU, with the simulator in its place.",
        epilog="Exit codes: the script's own; 1 for a finding; 2 for bad input.",
    )
    out.add_argument("--arch", default="sm_100a", choices=KNOWN, help="default: %(default)s")
    add_order(out)
    out.add_argument("--seed", type=int, default=0, metavar="N", help="of the order; default: 0")
    out.add_argument(
        "--max-instructions", type=int, metavar="N", help="of all warps, after which it is ended"
    )
    out.add_argument(
        "--jobs", type=int, metavar="N",
        help="processes that simulate a grid's clusters, where these are independent; default: "
        "as many as pay, at most one a core",
    )  # fmt: skip
    out.add_argument(
        "--clusters", type=int, metavar="N",
        help="simulate no more of a grid, and say so; the outputs of others are not written",
    )  # fmt: skip
    out.add_argument("--unchecked", action="store_true", help="look for no races: a quarter faster")
    out.add_argument("--json", type=Path, metavar="FILE", help="write what was found, for programs")
    out.add_argument("--ptx", action="store_true", help="print the PTX around what was found")
    out.add_argument(
        "--resources", action="store_true", help="print what kernels take, and bank conflicts"
    )
    out.add_argument("--time", action="store_true", help="predict how long each launch takes")
    out.add_argument(
        "--trace", metavar="FILE", help="with --time: for Perfetto; FILE.svg: a picture of one CTA"
    )
    out.add_argument(
        "--gpu",
        default="",
        metavar="NAME,K=V",
        help='for --time, as "b200,clock=1.6,l2=12" (GHz, TB/s)',
    )
    out.add_argument("script", help="a Python script that compiles and launches kernels")
    rest = out.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the script")
    rest.required = False
    return out


@answered
def main(
    argv: Sequence[str] | None = None,
    at_launch: Callable[[argparse.Namespace, Calls], None] | None = None,
) -> int:
    """``at_launch``: called before the script's first launch, with what it may still change."""
    options = parser().parse_args(argv)
    script = Path(options.script)
    if not script.is_file():
        return refuse(f"{script} is not a file")
    try:
        compile(script.read_bytes(), options.script, "exec")
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return refuse(f"{script}{line} is no Python: {getattr(error, 'msg', error)}")
    if not 0 <= options.seed < 1 << 31:
        return refuse(f"--seed {options.seed}: takes a number from 0 to {(1 << 31) - 1}")
    if options.max_instructions is not None and options.max_instructions < 1:
        return refuse(f"--max-instructions {options.max_instructions}: takes a number from 1")
    if options.jobs is not None and not 1 <= options.jobs <= MOST_JOBS:
        return refuse(f"--jobs {options.jobs}: takes a number from 1 to {MOST_JOBS}")
    if options.clusters is not None and (options.clusters < 1 or options.unchecked):
        return refuse(f"--clusters {options.clusters}: takes a number from 1, and checks")
    for name in ("json", "trace"):
        given = getattr(options, name)
        if given is not None and os.path.exists(given) and script.samefile(given):
            return refuse(f"--{name} {given}: this is the script")
    if why := _bad_clock(options):
        return refuse(why)
    if options.json is not None:
        # NOTE: absolute, since the script may change the working directory
        options.json = writable("--json", str(options.json)).absolute()
        options.json.write_text("", encoding="utf-8")  # an earlier run's goes
    os.environ["CUTE_DSL_ARCH"] = options.arch  # the DSL reads it once, when it is imported
    os.environ.update(NO_DISK_CACHES | INTERPRETED)
    from cutex.sim.host.calls import Calls, Clock
    from cutex.sim.host.dsl_stand_in import dsl_on_cpu
    from cutex.sim.host.stopwatch import STOPWATCH
    from cutex.sim.host.torch_stand_in import torch_on_cpu
    from cutex.simulation import SimulatedDevice, simulating

    gpu = arch(options.arch)
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(script.resolve().parent)  # as if Python had been given the script
    with torch_on_cpu(gpu) as memory:
        clock = Clock(options.gpu, options.trace) if options.time else None
        STOPWATCH.predicted = 0.0 if options.time else None
        calls = Calls(
            options.order or "fifo", options.seed, memory, options.max_instructions, clock,
            options.resources, options.jobs, not options.unchecked, options.clusters,
        )  # fmt: skip
        if at_launch is not None:
            calls.at_launch = lambda: at_launch(options, calls)
        end = _End()
        try:
            own = SimulatedDevice(options.arch, calls.launch)  # cutex.matmul and the like
            with dsl_on_cpu(gpu, calls), simulating(own):
                end = _run(options.script)
        finally:
            calls.tell(options.ptx)  # before the script's own traceback, of which it is the cause
            end.tell()
            if STOPWATCH.read:
                print(f"cutex: {STOPWATCH}", file=sys.stderr)
            print(f"cutex: {calls}", file=sys.stderr)
            if options.json is not None:
                write_whole(options.json, json.dumps(calls.as_dict(), indent=1) + "\n")
    return end.code or int(calls.failed)


class _End(NamedTuple):
    """How a script ended: its exit code, and the error that it raised, or its last words."""

    code: int = 0
    error: Exception | None = None
    text: str = ""

    def tell(self) -> None:
        if self.error is not None:
            sys.excepthook(type(self.error), self.error, self.error.__traceback__)
        elif self.text:
            print(self.text, file=sys.stderr)


def _run(script: str) -> _End:
    """Run the script as Python would. Errors of kernels and the script's own are reported later."""
    from cutex.sim.errors import LaunchError, SimError

    try:
        runpy.run_path(script, run_name="__main__")
    except Missing:  # as a C compiler
        raise
    except SystemExit as left:
        if not isinstance(left.code, int | None):
            return _End(1, text=str(left.code))
        return _End(left.code or 0)
    except LaunchError as error:
        print(f"cutex: {error}", file=sys.stderr)
        return _End(1)
    except SimError:
        return _End(1)
    except BrokenPipeError:  # as in ... | head
        print_nowhere()
    except KeyboardInterrupt:
        print("cutex: interrupted", file=sys.stderr)
        return _End(INTERRUPTED)
    except Exception as error:
        return _End(1, error.with_traceback(_within(script, error.__traceback__)))
    return _End()


def _within(script: str, trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on, as Python would print it."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename != script:
        found = found.tb_next
    return found or trace


def _bad_clock(options: argparse.Namespace) -> str:
    """A sentence on what is wrong with --time, --trace and --gpu; empty if nothing is."""
    if not options.time:
        given = "--trace" if options.trace is not None else "--gpu" if options.gpu else ""
        return f"{given} goes with --time" if given else ""
    from cutex.sim.timing.gpus import gpu, of_arch

    try:
        board = gpu(options.gpu or of_arch(options.arch))
    except ValueError as error:
        return str(error)
    if board.arch != options.arch:
        return f"--gpu {options.gpu}: is a GPU of {board.arch}, the script runs for {options.arch}"
    if options.trace is not None:
        options.trace = str(writable("--trace", options.trace).absolute())
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
