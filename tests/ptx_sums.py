"""python tests/ptx_sums.py: whether the PTX of any kernel differs between two checkouts.

    git worktree add ../before main
    python tests/ptx_sums.py ../before            # against this checkout: a line for each change
    python tests/ptx_sums.py ../before --only gemm --every

A refactoring changes no kernel. Each checkout compiles the same subjects with its own code: every
stage of every ladder for the sizes of its sweep, and calls of the public operators with their
options; a subject is named by what is computed, not by a config. Names, comments and lines of the
source do not count. By default a sixth of the subjects, always the same; a compiled kernel is kept
in the cache, so a second run takes seconds. Exit code 1 if a kernel differs or does not compile.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

SHARE = 6  # one of so many subjects is compiled by default
Subject = Callable[[], str]  # compiles, and returns the PTX


def normal(ptx: str) -> str:
    """PTX without what may differ between kernels that run alike: names, comments, source lines."""
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"(?m)^\s*\.(loc|file)\b.*$", "", ptx)
    ptx = re.sub(r"(?s)\.section\s+\.debug\w*.*?\n\s*\}", "", ptx)
    for number, name in enumerate(re.findall(r"\.(?:entry|func)\s+([\w$]+)", ptx)):
        ptx = re.sub(rf"\b{re.escape(name)}(?=\b|_param)", f"kernel{number}", ptx)
    return "\n".join(line.strip() for line in ptx.splitlines() if line.strip())


def sum_of(ptx: str) -> str:
    return hashlib.sha256(normal(ptx).encode()).hexdigest()


# ---- subjects, of the checkout that is on the path


def subjects() -> Iterator[tuple[str, Subject]]:
    """All subjects, by name."""
    from cutex.arch import ARCHS

    for arch in ARCHS:
        yield from stages(arch)
        yield from matmuls(arch)
        yield from grouped(arch)
        yield from scaled(arch)
        yield from attentions(arch)


def stages(arch: str) -> Iterator[tuple[str, Subject]]:
    """Every stage of every operator, for one problem of its sweep, or several where it chooses."""
    from cutex.bench.run import compile_stage, settle
    from cutex.problem import OPS, problem_class
    from cutex.problem.stage import ladders

    def ptx(stage: Any, problem: Any) -> str:
        return compile_stage(settle(stage, problem, timed=False), problem.dtype).ptx

    for op in OPS:
        kind = problem_class(op)
        for stage in ladders(op).stages(arch) if arch in ladders(op).archs else ():
            for sizes, dtype in itertools.product(kind.cases["sweep"], kind.dtypes):
                problem = kind(**sizes, dtype=dtype)
                if not stage.chooses and (sizes, dtype) != (kind.cases["sweep"][0], kind.dtypes[0]):
                    continue
                yield (
                    f"{op} {arch} stage {stage.number} {problem.size}",
                    partial(ptx, stage, problem),
                )


def launched(arch: str, call: Callable[[], Any]) -> str:
    """The PTX of the kernel that `call` launches for tensors on the CPU."""
    from cutex.ops import device
    from cutex.simulation import SimulatedDevice, simulating

    for cache in device._caches:
        cache.clear()  # plans of calls before, which launch on another simulator
    found: list[str] = []
    with simulating(SimulatedDevice(arch, lambda compiled, tensors: found.append(compiled.ptx))):
        call()
    return "\n".join(found)


def matmuls(arch: str) -> Iterator[tuple[str, Subject]]:
    import torch

    import cutex

    sizes = (4096, 4096, 4096), (16, 4096, 4096), (160, 8192, 1024), (104, 504, 1024)
    dtypes = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    options: dict[str, Callable[[int, int], dict[str, Any]]] = {
        "plain": lambda m, n: {},
        "bias, gelu": lambda m, n: {"bias": torch.empty(n).bfloat16(), "activation": "gelu"},
        "gated": lambda m, n: {"activation": "gated_silu"},
        "scales": lambda m, n: {"scale_a": torch.empty(m, 1), "scale_b": torch.empty(1, n)},
        "fp32 out": lambda m, n: {"out_dtype": torch.float32},
    }
    for (m, n, k), dtype, (name, option) in itertools.product(sizes, dtypes, options.items()):

        def call(m: int, n: int, k: int, dtype: torch.dtype, option: Any) -> Any:
            a, b = torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype).mT
            return cutex.matmul(a, b, **option(m, n))

        bound = partial(call, m, n, k, dtype, option)
        yield f"matmul {arch} {m}x{n}x{k} {dtype} {name}", partial(launched, arch, bound)


def grouped(arch: str) -> Iterator[tuple[str, Subject]]:
    """Products of groups: of rows, in order or by an index, and sums over them."""
    import torch

    import cutex

    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    kinds = {"scale_recipe_a": "BlockWise1x128", "scale_recipe_b": "BlockWise128x128"}

    def call(form: str, groups: int, rows: int, n: int, k: int) -> Any:
        offs = torch.zeros(groups, dtype=torch.int32)
        x, w = torch.empty(rows, k, dtype=bf16), torch.empty(groups, n, k, dtype=bf16).mT
        match form:
            case "sums":
                return cutex.grouped_mm(x.mT, torch.empty(rows, n, dtype=bf16), offs)
            case "by an index":
                index = torch.zeros(rows, dtype=torch.int32)
                return cutex.grouped_mm(x, w, offs, index=index)
            case "bias, gated":
                bias = torch.empty(groups, n, dtype=bf16)
                return cutex.grouped_mm(x, w, offs, bias=bias, activation="gated_silu")
            case "mxfp8":
                of_x, of_w = (
                    torch.empty(*s, k // 32, dtype=torch.float8_e8m0fnu)
                    for s in ((rows,), (groups, n))
                )
                factors = {"scale_recipe_a": "BlockWise1x32", "scale_recipe_b": "BlockWise1x32",
                           "swizzle_a": "NO_SWIZZLE", "swizzle_b": "NO_SWIZZLE"}  # fmt: skip
                x, w = x.to(e4m3), w.mT.to(e4m3).mT
                return cutex.scaled_grouped_mm(x, w, of_x, of_w, offs, **factors)
            case "fp8 blocks":
                of_x = torch.empty(k // 128, rows).T
                of_w = torch.empty(groups, k // 128, n // 128)
                x, w = x.to(e4m3), w.mT.to(e4m3).mT
                return cutex.scaled_grouped_mm(x, w, of_x, of_w, offs, **kinds)
        return cutex.grouped_mm(x, w, offs)

    forms = "plain", "bias, gated", "by an index", "sums", "fp8 blocks", "mxfp8"
    sizes = (4, 8192, 4096, 1024), (8, 4096, 2048, 1024), (64, 512, 1024, 512)
    for form, (groups, rows, n, k) in itertools.product(forms, sizes):
        name = f"grouped {arch} {groups} groups {rows}x{n}x{k} {form}"
        yield name, partial(launched, arch, partial(call, form, groups, rows, n, k))


def scaled(arch: str) -> Iterator[tuple[str, Subject]]:
    """Products with factors of blocks, and with weights of 4 bits."""
    import torch

    import cutex
    from cutex.ops.w4.packed import W4Weight
    from cutex.problem.w4.layout import W4Format

    def fp8(m: int, n: int, k: int, activation: str | None) -> Any:
        a, b = (torch.empty(s, k, dtype=torch.float8_e4m3fn) for s in (m, n))
        of_a, of_b = torch.empty(k // 128, -(-m // 4) * 4).T[:m], torch.empty(k // 128, n // 128)
        return cutex.scaled_mm(
            a, b.mT, of_a, of_b, scale_recipe_a="BlockWise1x128",
            scale_recipe_b="BlockWise128x128", activation=activation,
        )  # fmt: skip

    def w4(m: int, n: int, k: int, of: W4Format) -> Any:
        packed = torch.empty(-(-n // 64), -(-k // 128), of.words, dtype=torch.int32)
        w = W4Weight(packed, None, n, k, of, torch.bfloat16, "int4")
        return cutex.matmul(torch.empty(m, k, dtype=torch.bfloat16), w)

    sizes = (4096, 4096, 4096), (1, 8192, 4096), (64, 2048, 4096), (128, 4096, 2048)
    for m, n, k in sizes:
        for activation in (None, "silu"):
            name = f"scaled {arch} {m}x{n}x{k} fp8_block {activation}"
            yield name, partial(launched, arch, partial(fp8, m, n, k, activation))
        for of in (W4Format(), W4Format("int4", 32, True), W4Format("fp4", 16)):
            yield (
                f"scaled {arch} {m}x{n}x{k} {of}",
                partial(launched, arch, partial(w4, m, n, k, of)),
            )


def attentions(arch: str) -> Iterator[tuple[str, Subject]]:
    import torch

    import cutex

    heads = (16, 16), (32, 8)
    lengths = (4096, 4096), (1, 4096)
    options: tuple[dict[str, Any], ...] = (
        {}, {"causal": True}, {"window_size": (127, 0)}, {"softcap": 30.0, "causal": True},
        {"return_lse": True},
    )  # fmt: skip
    dims = (64, 64), (128, 128), (192, 128), (256, 256)
    for (hq, hk), (sq, sk), option, (d, dv) in itertools.product(heads, lengths, options, dims):

        def call(shapes: tuple[tuple[int, ...], ...], option: dict[str, Any]) -> Any:
            tensors = (torch.empty(2, *shape, dtype=torch.bfloat16) for shape in shapes)
            return cutex.flash_attn_func(*tensors, **option)

        bound = partial(call, ((sq, hq, d), (sk, hk, d), (sk, hk, dv)), option)
        name = f"attention {arch} {sq}x{sk} heads {hq}/{hk} head dim {d}/{dv} {option}"
        yield name, partial(launched, arch, bound)


def sums(only: str, every: bool) -> dict[str, str]:
    """The sums of this checkout's subjects whose name contains `only`; an error's first line where
    one cannot be compiled."""
    found = {}
    for name, ptx in subjects():
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16)
        if only not in name or not (every or number % SHARE == 0):
            continue
        try:
            found[name] = sum_of(ptx())
        except (ValueError, TypeError) as error:  # what this checkout does not take
            found[name] = str(error).partition("\n")[0]
    return found


# ---- two checkouts


def sums_in(checkout: Path, only: str, every: bool) -> dict[str, str]:
    """The sums of another checkout, by this file in a process with that checkout's package."""
    command = [sys.executable, "-W", "ignore", __file__, "--print", "--only", only]
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), *others])}
    ran = subprocess.run(
        command + ["--every"] * every, cwd=checkout, env=environment, stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    return json.loads(ran.stdout.splitlines()[-1])


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for each subject whose kernel is another one, new or gone."""
    lines = [f"gone: {name}" for name in before.keys() - after.keys()]
    lines += [f"new: {name}" for name in after.keys() - before.keys()]
    lines += [f"differs: {name}" for name in before.keys() & after.keys()
              if before[name] != after[name]]  # fmt: skip
    return sorted(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, nargs="?", help="another checkout")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    parser.add_argument("--every", action="store_true", help="all subjects, not a sixth")
    parser.add_argument("--print", action="store_true", help="print this checkout's sums instead")
    args = parser.parse_args(argv)
    if args.print:
        print(json.dumps(sums(args.only, args.every)))
        return 0
    if args.before is None or not (args.before / "cutex").is_dir():
        parser.error(f"{args.before}: name another checkout of this repository")
    here = Path(__file__).resolve().parent.parent
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(sums_in, path.resolve(), args.only, args.every)
                for path in (args.before, here)]  # fmt: skip
        before, after = (future.result() for future in both)
    found = differences(before, after)
    refused = sorted({why for why in after.values() if not re.fullmatch("[0-9a-f]{64}", why)})
    kernels = f"{len(after)} subjects, {len(found)} differences"
    print(*found, f"{kernels}, refused for {len(refused)} reasons", *refused, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
