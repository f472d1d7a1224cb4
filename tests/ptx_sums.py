"""python tests/ptx_sums.py: whether the PTX of any kernel differs between two checkouts.

    git worktree add ../before main
    python tests/ptx_sums.py ../before            # against this checkout: a line for each change
    python tests/ptx_sums.py ../before --only gemm --every
    python tests/ptx_sums.py --print --traced --every --share 0/4 > sums   # a part, elsewhere

A refactoring changes no kernel. Each checkout compiles the same subjects with its own code: every
stage of every ladder for the sizes of its sweep, and calls of the public operators with their
options; a subject is named by what is computed, not by a config. Names, comments and lines of the
source do not count. First both trace the subjects, some seconds each: of one IR and the same passes
the compiler makes one PTX. Only those whose IR differs are compiled. By default a sixth of the
subjects, always the same. Exit code 1 if a kernel differs or does not compile.
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
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

SHARE = 0, 6  # the subjects of a number that has this remainder modulo this, by default
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


# ---- IR in the place of PTX


class Traced(BaseException):
    """What a compiler is given: the IR of a kernel and of its launch, and the passes to run."""


def normal_ir(ir: str) -> str:
    """IR without the names of kernels, host functions and modules, which number them instead."""
    names = re.findall(r"(?:cuda\.kernel|func\.func|gpu\.module)[\w ]* @([\w$]+)", ir)
    for number, name in enumerate(dict.fromkeys(names)):
        ir = re.sub(rf"@{re.escape(name)}\b", f"@{number}", ir)
    return ir


@contextmanager
def tracing_only() -> Iterator[None]:
    """A context in which a compiled kernel's "PTX" is its IR before the first pass, kept in a cache
    of its own.

    NOTE: plans that are made meanwhile keep such kernels; the process is for nothing else.
    """
    from cutlass.base_dsl.compiler import Compiler

    from cutex.compile import cache, compiling

    build = compiling._build

    def no_passes(self: Any, module: Any, pipeline: str, *others: Any, **options: Any) -> None:
        raise Traced(normal_ir(str(module)) + re.sub(r"dump-\w+-path='[^']*'", "", pipeline))

    def trace(*arguments: Any) -> None:
        folder, entry = arguments[3:5]
        try:
            build(*arguments)
        except Traced as traced:
            contents = {"ptx": str(traced), "cubin": "", "object": ""}
            for kind, content in contents.items():
                (folder / cache.FILES[kind]).write_text(content, encoding="utf-8")
            sums = {kind: cache.digest(content.encode()) for kind, content in contents.items()}
            meta = {**entry, "dynamic_smem": {}, "compile_seconds": 0.0, "checksums": sums}
            meta["checksum"] = cache.digest(cache.canonical(meta))
            (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    with (
        tempfile.TemporaryDirectory() as cached,
        patch.dict(os.environ, CUTEX_CACHE=cached),
        patch.object(Compiler, "compile", no_passes),
        patch.object(compiling, "_build", trace),
    ):
        yield


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
        yield from gradients(arch)
        yield from caches(arch)
        yield from rows(arch)


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
                name = f"{op} {arch} stage {stage.number} {problem.size} {dtype}"
                yield name, partial(ptx, stage, problem)


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

    sizes = (
        (4096, 4096, 4096),
        (16, 4096, 4096),
        (160, 8192, 1024),
        (104, 504, 1024),
        (509, 1003, 777),
    )
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
    from cutex.problem.w4 import layout
    from cutex.problem.w4.layout import W4Format

    # an older checkout's weights have none
    versions = [v for v in (getattr(layout, "LAYOUT_VERSION", None),) if v is not None]

    def fp8(m: int, n: int, k: int, activation: str | None) -> Any:
        a, b = (torch.empty(s, k, dtype=torch.float8_e4m3fn) for s in (m, n))
        of_a, of_b = torch.empty(k // 128, -(-m // 4) * 4).T[:m], torch.empty(k // 128, n // 128)
        return cutex.scaled_mm(
            a, b.mT, of_a, of_b, scale_recipe_a="BlockWise1x128",
            scale_recipe_b="BlockWise128x128", activation=activation,
        )  # fmt: skip

    def w4(m: int, n: int, k: int, of: W4Format) -> Any:
        packed = torch.empty(-(-n // 64), -(-k // 128), of.words, dtype=torch.int32)
        if hasattr(layout, "word_dtype"):  # an older checkout's are all int32
            packed = packed.view(getattr(torch, layout.word_dtype(of, "bf16")))
        w = W4Weight(packed, None, n, k, of, torch.bfloat16, "int4", *versions)
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


def gradients(arch: str) -> Iterator[tuple[str, Subject]]:
    """The forward and the backward of a call, one after the other."""
    import torch

    import cutex

    def call(heads: int, dims: tuple[int, int], option: dict[str, Any]) -> Any:
        shapes = (16, dims[0]), (heads, dims[0]), (heads, dims[1])
        q, k, v = (
            torch.empty(2, 1024, *s, dtype=torch.bfloat16, requires_grad=True) for s in shapes
        )
        out = cutex.flash_attn_func(q, k, v, **option)
        return torch.autograd.grad(out, (q, k, v), torch.empty_like(out))

    options: tuple[dict[str, Any], ...] = (
        {}, {"causal": True}, {"window_size": (127, 0)}, {"deterministic": True},
        {"softcap": 30.0},
    )  # fmt: skip
    dims = (64, 64), (128, 128), (192, 128), (256, 256)
    for heads, dim, option in itertools.product((16, 4), dims, options):
        name = f"gradients {arch} heads 16/{heads} head dim {dim[0]}/{dim[1]} {option}"
        yield name, partial(launched, arch, partial(call, heads, dim, option))


def caches(arch: str) -> Iterator[tuple[str, Subject]]:
    """Attention of new queries to caches: dense, by pages, of 8 bits, of latent keys."""
    import torch

    import cutex

    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn

    def call(form: str, queries: int, dims: tuple[int, int]) -> Any:
        q = torch.empty(4, queries, 16, dims[0], dtype=bf16)
        lengths, table = torch.full((4,), 1024, dtype=torch.int32), None
        kept = e4m3 if form == "fp8" else bf16
        shape = (32, 256, 4) if form == "paged" else (4, 2048, 4)
        k, v = (torch.empty(*shape, x, dtype=kept) for x in dims)
        new: tuple[Any, ...] = ()
        if form == "paged":
            table = torch.zeros(4, 8, dtype=torch.int32)
        if form == "appended":
            new = tuple(torch.empty(4, queries, 4, x, dtype=bf16) for x in dims)
        if form == "fp8":
            q = q.to(e4m3)
        return cutex.flash_attn_with_kvcache(
            q, k, v, *new, cache_seqlens=lengths, page_table=table, causal=True
        )

    def latent(queries: int, heads: int) -> Any:
        q = torch.empty(4, queries, heads, 576, dtype=bf16)
        cache, table = torch.empty(64, 64, 1, 576, dtype=bf16), torch.zeros(4, 16)
        lengths = torch.full((4,), 512, dtype=torch.int32)
        return cutex.flash_mla_with_kvcache(q, cache, table.int(), lengths, causal=True)

    forms = "dense", "paged", "fp8", "appended"
    dims = (64, 64), (128, 128), (256, 256)
    for form, queries, dim in itertools.product(forms, (1, 64), dims):
        name = f"caches {arch} {form} {queries} queries head dim {dim[0]}/{dim[1]}"
        yield name, partial(launched, arch, partial(call, form, queries, dim))
    for queries, heads in itertools.product((1, 2), (16, 128)):
        bound = partial(latent, queries, heads)
        yield (
            f"caches {arch} latent {queries} queries {heads} heads",
            partial(launched, arch, bound),
        )


def rows(arch: str) -> Iterator[tuple[str, Subject]]:
    """Operators on rows, with the gradients of those that have one."""
    import torch

    import cutex

    def call(form: str, columns: int, dtype: torch.dtype) -> Any:
        x = torch.empty(2048, columns, dtype=dtype, requires_grad=True)
        w = torch.empty(columns, dtype=dtype, requires_grad=True)
        match form:
            case "rms norm" | "layer norm":
                y = {"rms norm": cutex.rms_norm, "layer norm": cutex.layer_norm}[form](x, w)
                return torch.autograd.grad(y, (x, w), torch.empty_like(y))
            case "norm of a sum":
                return cutex.rms_norm(x.detach(), w.detach(), residual=x.detach())
            case "softmax":
                y = cutex.softmax(x)
                return torch.autograd.grad(y, (x,), torch.empty_like(y))
            case "cross-entropy":
                loss = cutex.cross_entropy(x, torch.zeros(2048, dtype=torch.int64))
                return torch.autograd.grad(loss, (x,))
            case "scan":
                return cutex.scan(x.detach())
        return cutex.reduce(x.detach(), "sum", 1 if form == "sum of rows" else 0)

    forms = "rms norm", "layer norm", "norm of a sum", "softmax", "cross-entropy", "scan"
    forms = (*forms, "sum of rows", "sum of columns")
    sizes = itertools.product((137, 1024, 4096, 32768), (torch.bfloat16, torch.float32))
    for form, (columns, dtype) in itertools.product(forms, sizes):
        name = f"rows {arch} {form} 2048x{columns} {dtype}"
        yield name, partial(launched, arch, partial(call, form, columns, dtype))


def selected(only: str, share: tuple[int, int]) -> Iterator[tuple[str, Subject]]:
    """The subjects whose name contains `only`, or is a line of a file @`only`, and whose number
    has remainder share[0] modulo share[1]."""
    names: Collection[str] | None = None
    if only.startswith("@"):
        names = Path(only[1:]).read_text(encoding="utf-8").splitlines()
    for name, ptx in subjects():
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16)
        if (only in name if names is None else name in names) and number % share[1] == share[0]:
            yield name, ptx


def sums(only: str, share: tuple[int, int], traced: bool = False) -> dict[str, str]:
    """The sums of this checkout's subjects (selected), of their IR if `traced`; an error's first
    line where one cannot be compiled."""
    found: dict[str, str] = {}
    with tracing_only() if traced else nullcontext():
        for name, ptx in selected(only, share):
            assert name not in found, f"two subjects have one name: {name}"
            try:
                found[name] = sum_of(ptx())
            except (ValueError, TypeError) as error:  # what this checkout does not take
                found[name] = str(error).partition("\n")[0]
    return found


# ---- two checkouts


def sums_in(
    checkout: Path, only: str, share: tuple[int, int] = (0, 1), traced: bool = False
) -> dict[str, str]:
    """The sums of another checkout, by this file in a process with that checkout's package."""
    command = [sys.executable, "-W", "ignore", __file__, "--print", "--only", only]
    command += ["--share", "{}/{}".format(*share), *["--traced"] * traced]
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), *others])}
    ran = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def sums_of_both(
    checkouts: tuple[Path, Path], *selection: Any
) -> tuple[dict[str, str], dict[str, str]]:
    """The sums of two checkouts, each by a process of its own."""
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(sums_in, path, *selection) for path in checkouts]
        before, after = (future.result() for future in both)
    return before, after


def compared(
    checkouts: tuple[Path, Path], only: str, share: tuple[int, int]
) -> tuple[dict[str, str], dict[str, str]]:
    """The sums of two checkouts: of IR where it is one, else of PTX."""
    before, after = sums_of_both(checkouts, only, share, True)
    names = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    if names:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            print(*names, sep="\n", file=file, flush=True)
            of_ptx = sums_of_both(checkouts, f"@{file.name}")
        before.update(of_ptx[0])
        after.update(of_ptx[1])
    return before, after


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
    parser.add_argument("--share", default="", help="I/N: the subjects of number I modulo N")
    parser.add_argument("--print", action="store_true", help="print this checkout's sums instead")
    parser.add_argument("--traced", action="store_true", help="with --print: sums of IR")
    args = parser.parse_args(argv)
    share = (0, 1) if args.every else SHARE
    if args.share:
        first, _, of = args.share.partition("/")
        share = int(first), int(of)
    if args.print:
        print(json.dumps(sums(args.only, share, args.traced)))
        return 0
    if args.before is None or not (args.before / "cutex").is_dir():
        parser.error(f"{args.before}: name another checkout of this repository")
    here = Path(__file__).resolve().parent.parent
    before, after = compared((args.before.resolve(), here), args.only, share)
    found = differences(before, after)
    refused = sorted({why for why in after.values() if not re.fullmatch("[0-9a-f]{64}", why)})
    kernels = f"{len(after)} subjects, {len(found)} differences"
    print(*found, f"{kernels}, refused for {len(refused)} reasons", *refused, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
