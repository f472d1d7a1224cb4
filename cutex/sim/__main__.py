"""python -m cutex.sim script.py: run a script that asks for a GPU, with the simulator in its place.

The script is not changed. What it puts on "cuda" is in host memory, what it compiles with the
CuTe DSL is compiled for the GPU that it sees, and what it launches is simulated: every
warp, barrier, copy and MMA. Exit codes: the script's own; 1 for a finding or an error of the
simulator; 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from cutex.arch import ALL, arch
from cutex.command import INTERRUPTED, print_nowhere, refuse
from cutex.orders import MOST_JOBS, ORDERS

# Libraries that keep compiled kernels on disk and load them from there, past the simulator.
NO_DISK_CACHES = {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
INTERPRETED = {"TRITON_INTERPRET": "1"}  # Triton kernels of the script run on the CPU


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m cutex.sim",
        description="Run a script that asks for a GPU, with the simulator in its place.",
        epilog="Exit codes: the script's own; 1 for a finding; 2 for bad input.",
    )
    out.add_argument("--arch", default="sm_100a", choices=ALL, help="default: %(default)s")
    out.add_argument("--order", default="fifo", choices=ORDERS, help="default: %(default)s")
    out.add_argument("--seed", type=int, default=0, metavar="N")
    out.add_argument(
        "--max-instructions", type=int, metavar="N", help="of all warps, after which it is ended"
    )
    out.add_argument(
        "--jobs", type=int, default=1, metavar="N",
        help="processes that simulate a grid's clusters, where these are independent",
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
        "--gpu", default="", metavar="NAME,K=V", help='for --time, as "b200,clock=1.6,l2=12"'
    )
    out.add_argument("script", help="a Python script that compiles and launches kernels")
    out.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the script")
    return out


def main(argv: Sequence[str] | None = None) -> int:
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
    if not 1 <= options.jobs <= MOST_JOBS:
        return refuse(f"--jobs {options.jobs}: takes a number from 1 to {MOST_JOBS}")
    if options.clusters is not None and (options.clusters < 1 or options.unchecked):
        return refuse(f"--clusters {options.clusters}: takes a number from 1, and checks")
    if options.json is not None:
        try:
            options.json.write_text("")  # NOTE: tried before anything is run
        except OSError as error:
            return refuse(f"--json {options.json}: {error.strerror}")
    if why := _bad_clock(options):
        return refuse(why)
    os.environ["CUTE_DSL_ARCH"] = options.arch  # which the DSL reads once, when it is imported
    os.environ.update(NO_DISK_CACHES | INTERPRETED)
    from cutex.sim.host.calls import Calls, Clock
    from cutex.sim.host.dsl_stand_in import dsl_on_cpu
    from cutex.sim.host.torch_stand_in import torch_on_cpu

    gpu = arch(options.arch)
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(script.resolve().parent)  # as if Python had been given the script
    with torch_on_cpu(gpu) as memory:
        clock = Clock(options.gpu, options.trace) if options.time else None
        calls = Calls(
            options.order, options.seed, memory, options.max_instructions, clock,
            options.resources, options.jobs, not options.unchecked, options.clusters,
        )  # fmt: skip
        try:
            with dsl_on_cpu(gpu, calls):
                code = _run(options.script)
        finally:
            calls.tell(options.ptx)
            print(f"cutex: {calls}", file=sys.stderr)
            if options.json is not None:
                options.json.write_text(json.dumps(calls.as_dict(), indent=1) + "\n")
    return code or int(calls.failed)


def _run(script: str) -> int:
    """Run the script as Python would; its exit code. What is wrong in kernels is printed later."""
    from cutex.sim.errors import LaunchError, SimError

    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except LaunchError as error:
        print(f"cutex: {error}", file=sys.stderr)
        return 1
    except SimError:
        return 1
    except BrokenPipeError:  # as in ... | head
        print_nowhere()
    except KeyboardInterrupt:
        print("cutex: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _bad_clock(options: argparse.Namespace) -> str:
    """What is wrong with --time, --trace and --gpu; nothing if empty."""
    if not options.time:
        given = "--trace" if options.trace else "--gpu" if options.gpu else ""
        return f"{given} goes with --time" if given else ""
    from cutex.sim.timing.gpus import gpu, of_arch

    try:
        board = gpu(options.gpu or of_arch(options.arch))
    except ValueError as error:
        return str(error)
    if options.trace and not Path(options.trace).absolute().parent.is_dir():
        return f"--trace {options.trace}: there is no such folder"
    if board.arch != options.arch:
        return f"--gpu {options.gpu}: is a GPU of {board.arch}, the script runs for {options.arch}"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
