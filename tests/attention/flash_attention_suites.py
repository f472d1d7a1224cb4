"""FlashAttention's own test files with our functions behind its names, on a Hopper GPU.

    git clone https://github.com/Dao-AILab/flash-attention ../flash-attention
    pip install einops
    python tests/attention/flash_attention_suites.py ../flash-attention/hopper/test_flash_attn.py
    python tests/attention/flash_attention_suites.py ../flash-attention/hopper/test_kvcache.py
    python tests/attention/flash_attention_suites.py -k paged \\
        ../flash-attention/tests/cute/test_flash_attn.py
    python tests/attention/flash_attention_suites.py ../flash-attention/tests/test_flash_attn.py \\
        --kinds 20 --lengths 4 -n 12 --gib 5 --progress found.txt

Nothing of them is in this repository: they run where they are, and import modules of the names that
they want, made here. A kind is a test with all parameters but the lengths; `--kinds` of each test
are drawn (`--seed`), `--lengths` of each, one process after another's compiling. What our functions
refuse is skipped with their sentence, so that the skips list what is missing; so is a reference
that needs more memory than `--gib`. A line for each test goes to `--progress` as it ends, and the
counts come last. hopper/test_kvcache.py is no test file, but a script that prints how far apart
FlashAttention-3 and 2 are: it is run as such, ours in the place of 3 and the definition in that of
2, and fails where they are further apart than rounding.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import inspect
import io
import itertools
import os
import random
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

LENGTHS = ("seqlen", "seqlen_q", "seqlen_k", "seqlen_q,seqlen_k")
# what changes no result: passed to ours where it has the argument, else dropped
WITHOUT_EFFECT = ("num_splits", "pack_gqa", "scheduler_metadata", "sm_margin", "gqa_decoding",
                  "gqa_parallel", "max_seqlen_k_hint", "tile_n", "min_seqlen_k",
                  "seqlen_k_per_split")  # fmt: skip
APART = 1e-3  # of O in fp16, whose values are below 0.25: four roundings
OTHERS = ("combine", "bw_compatibility", "generator_arg", "paged_kv_num_splits")  # not ours
LONG = 4000  # rows that are left out: their references take gigabytes each
ROUNDS = 20  # of 1000 in tests of races


def wants(parameters: dict[str, Any], name: str) -> bool:
    """Whether our functions could take the case, as far as its parameters tell it."""
    if any(x in name for x in OTHERS) or parameters.get("dropout_p", 0.0):
        return False
    if parameters.get("has_qv") or parameters.get("d", 8) % 8:
        return False
    if parameters.get("dtype") == torch.float8_e4m3fn and "kvcache" not in name:
        return False
    return max(lengths_of(parameters), default=0) < LONG


def lengths_of(parameters: dict[str, Any]) -> list[int]:
    return [x for name in LENGTHS if isinstance(x := parameters.get(name), int)]


# ---- what stands behind their names


def paged(more: dict[str, Any]) -> bool:
    """Whether keys are in pages, of which neither theirs nor ours have gradients."""
    return any(more.get(name) is not None for name in ("block_table", "page_table"))


def standing_in(function: Callable[..., Any], takes: tuple[str, ...] = ()) -> Callable[..., Any]:
    """`function` as their tests call it: what it refuses is a skip with its sentence."""

    def call(*given: Any, **more: Any) -> Any:
        for name in WITHOUT_EFFECT:
            if name not in takes:
                more.pop(name, None)
        probabilities = more.pop("return_attn_probs", False)
        if torch.is_tensor(window := more.get("window_size")):
            more["window_size"] = tuple(window.tolist())
        if probabilities:
            more["return_lse"] = True
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not paged(more)):
                found = function(*given, **more)
        except (ValueError, TypeError) as error:
            pytest.skip(f"refused: {error}")
        return (*found, None) if probabilities else found

    return call


def stand_ins() -> dict[str, Callable[..., Any]]:
    """Our functions by FlashAttention's names."""
    import cutex

    dense = ("flash_attn_func", "flash_attn_varlen_func")
    packed = [f"flash_attn_{x}packed_func" for x in ("qkv", "kv", "varlen_qkv", "varlen_kv")]
    found = {name: standing_in(getattr(cutex, name)) for name in (*dense, *packed)}
    name = "flash_attn_with_kvcache"
    return {**found, name: standing_in(getattr(cutex, name), takes=("num_splits",))}


def install(test_file: Path) -> None:
    """Make the modules that the test file imports: flash_attn_interface of FlashAttention-3,
    flash_attn of 2 from the clone, and ours behind the names of both."""
    clone = next(x for x in test_file.parents if (x / "flash_attn").is_dir())
    sys.path[:0] = [str(test_file.parent), str(clone)]
    sys.modules["flash_attn_2_cuda"] = ModuleType("flash_attn_2_cuda")  # its kernels
    ours = stand_ins()
    third = ModuleType("flash_attn_interface")
    third.__dict__.update(ours)
    third.__dict__["get_scheduler_metadata"] = lambda *given, **more: None
    third.__dict__["flash_attn_combine"] = None
    sys.modules["flash_attn_interface"] = third
    import flash_attn

    flash_attn.__dict__.update(ours)
    if "cute" in test_file.parts:
        install_cute()


def install_cute() -> None:
    """Put ours behind the names of FlashAttention-4, whose functions return LSE, too."""
    import flash_attn.cute as package
    import flash_attn.cute.interface as interface

    import cutex

    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        call = by_name(getattr(cutex, name), getattr(interface, name))
        for module in (interface, package):
            setattr(module, name, call)


def by_name(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, called with the arguments of `theirs`; those of theirs alone that matter are a
    skip."""
    takes, names = inspect.signature(ours).parameters, [*inspect.signature(theirs).parameters]
    stand_in = standing_in(ours)

    def call(*given: Any, **more: Any) -> Any:
        more = {**dict(zip(names, given, strict=False)), **more}
        lacking = [
            name
            for name, x in more.items()
            if name not in takes and name not in WITHOUT_EFFECT and not _is_default(x)
        ]
        if lacking:
            pytest.skip(f"refused: {', '.join(lacking)}")
        more = {name: x for name, x in more.items() if name in takes}
        return stand_in(**{**more, "return_lse": True})

    return call


def _is_default(x: Any) -> bool:
    return x is None or (isinstance(x, (bool, int, float)) and x == 0)


# ---- their script


def run_script(file: Path) -> int:
    """Run a script of theirs that prints how far apart the results of FlashAttention-3 and 2 are,
    ours and the definition; 1 if that is more than rounding, or it prints none."""
    install(file)
    import flash_attn

    flash_attn.__dict__["flash_attn_with_kvcache"] = cache_by_definition
    largest = []
    for options in ([], ["--causal", "--splits", "3"]):
        sys.argv, printed = [str(file), "--validate", "--repeats", "1", *options], io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(file), run_name="__main__")
        found = re.findall(r"^diff-max ([\d.e+-]+|nan)", printed.getvalue(), re.M)
        print(f"passed {' '.join(options) or '(no options)'}: apart by {', '.join(found)}")
        largest += [float(x) for x in found] or [float("nan")]
    return int(not all(x <= APART for x in largest))


def cache_by_definition(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    cache_batch_idx: torch.Tensor, causal: bool, return_softmax_lse: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Their function for q (batch, queries, heads, D), in float32; 0 where a query sees no key."""
    out, lse = torch.zeros_like(q), q.new_zeros(*q.shape[:1], q.shape[2], q.shape[1]).float()
    group = q.shape[2] // k_cache.shape[2]
    of_entries = zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)
    for b, (entry, n) in enumerate(of_entries):
        for head in range(q.shape[2]):
            k, v = (x[entry, :n, head // group].float() for x in (k_cache, v_cache))
            scores = q[b, :, head].float() @ k.T * q.shape[-1] ** -0.5
            if causal:
                seen = torch.ones_like(scores, dtype=torch.bool).tril(n - q.shape[1])
                scores = scores.masked_fill(~seen, -torch.inf)
            lse[b, head] = scores.logsumexp(-1)
            out[b, :, head] = (scores.softmax(-1).nan_to_num(0.0) @ v).to(q.dtype)
    return (out, lse) if return_softmax_lse else out


# ---- fewer of what a test repeats


class FewerPairs:
    """itertools in their module, whose product leaves out what is refused: chunks, and values of
    more than 256 columns, which stand in one loop with what is not."""

    def product(self, *of: Any) -> Iterator[tuple[Any, ...]]:
        for pair in itertools.product(*of):
            columns, chunk, *_ = (*pair, 0)
            is_kind = not isinstance(columns, bool) and columns >= 32
            if not is_kind or isinstance(chunk, bool) or (columns <= 256 and chunk == 0):
                yield pair


class LessMemory:
    """torch in their module, whose `empty` fills no GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*shape: Any, **kind: Any) -> torch.Tensor:
        large = len(shape) == 1 and isinstance(shape[0], int) and shape[0] >= 2**30
        return torch.empty(*((0,) if large else shape), **kind)


def fewer(*of: int) -> range:
    """range in their module: of a test's 1000 rounds only some."""
    return builtins.range(min(of[0], ROUNDS)) if of == (1000,) else builtins.range(*of)


def lessen(module: ModuleType) -> None:
    module.__dict__["itertools"] = FewerPairs()
    module.__dict__["torch"] = LessMemory()
    module.__dict__["range"] = fewer
    if "IS_SM90" in module.__dict__ and "cute" in Path(module.__file__ or "").parts:
        module.__dict__["IS_SM90"] = False  # what FlashAttention-4 lacks on Hopper


# ---- pytest's side


def drawn(items: list[pytest.Item], kinds: int, lengths: int, seed: int) -> list[pytest.Item]:
    """`lengths` cases of each of `kinds` kinds of each test, each kind for one process."""
    by_test: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        name = item.originalname  # type: ignore[attr-defined]
        if wants(parameters, name):
            kind = str({k: v for k, v in parameters.items() if k not in LENGTHS})
            by_test.setdefault(name, {}).setdefault(kind, []).append(item)
    draw, found = random.Random(seed), []
    for name, of_test in by_test.items():
        for kind in draw.sample(sorted(of_test), min(kinds, len(of_test))):
            some = of_test[kind]
            for item in draw.sample(some, min(lengths, len(some))):
                item.add_marker(pytest.mark.xdist_group(name + kind))
                found.append(item)
    draw.shuffle(found)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for module in {id(x.module): x.module for x in items}.values():  # type: ignore[attr-defined]
        lessen(module)
    kinds, lengths, seed = map(int, os.environ["SUITE_SHARE"].split())
    items[:] = drawn(items, kinds, lengths, seed)


def pytest_configure(config: pytest.Config) -> None:
    install(Path(os.environ["SUITE_FILE"]))
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        share = float(os.environ["SUITE_GIB"]) * 2**30 / total
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    try:
        return (yield)
    except torch.OutOfMemoryError:
        pytest.skip("memory: the reference takes more than this process has")
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


COUNTS: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test that ended, in the process that has all of them."""
    if os.environ.get("PYTEST_XDIST_WORKER") or report.when != "call":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if report.failed:
        reason = str(report.longrepr).splitlines()[-1]
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", reason)
    COUNTS[f"{report.outcome} {reason[:110]}" if report.skipped else report.outcome] += 1
    reason = " ".join(reason.split())[:300]
    with open(os.environ["SUITE_PROGRESS"], "a", encoding="utf-8") as file:
        file.write(f"{report.outcome} {report.duration:.1f} s {report.nodeid} {reason}\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for outcome, count in COUNTS.most_common():
        terminalreporter.write_line(f"{count:5} {outcome}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="their test file")
    parser.add_argument("--kinds", type=int, default=12, help="kinds of each test")
    parser.add_argument("--lengths", type=int, default=4, help="lengths of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gib", type=float, default=5.0, help="memory of each process")
    parser.add_argument("--progress", default=os.devnull)
    parser.add_argument("-n", type=int, default=8, help="processes")
    parser.add_argument("-k", default="", help="as pytest's")
    args = parser.parse_args()
    if not args.file.is_file():
        parser.error(f"{args.file}: there is no such file; clone Dao-AILab/flash-attention")
    if "parse_args()" in args.file.read_text(encoding="utf-8"):
        return run_script(args.file.resolve())
    here = Path(__file__).resolve()
    env = {
        **os.environ,
        "SUITE_FILE": str(args.file.resolve()),
        "SUITE_SHARE": f"{args.kinds} {args.lengths} {args.seed}",
        "SUITE_GIB": str(args.gib),
        "SUITE_PROGRESS": str(Path(args.progress).resolve()),
        "PYTHONPATH": os.pathsep.join(
            [str(here.parent), str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    processes = ["-n", str(args.n), "--dist", "loadgroup"] if args.n > 1 else []
    return subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", here.stem, "-p", "no:cacheprovider",
            "-c", os.devnull, "--rootdir", str(args.file.resolve().parent), "--tb=line", "-k",
            args.k, *processes, str(args.file.resolve()),
        ],
        env=env,
    ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
