from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver
from cutlass._mlir_helpers import op
from cutlass._mlir_helpers.arith import ArithValue
from cutlass.cutlass_dsl import CuTeDSL

from cutex.arch import ARCHS, arch
from cutex.compile import FILES, Compiled, compile
from cutex.compile.arguments import Operand, fake_arguments
from cutex.compile.resources import count_instructions, opcodes, resources, sass
from cutex.debug_info import _FILE, _LOC, _MARK, debug_info_of
from cutex.errors import NoCache, NoDisassembler
from cutex.kernels.gemm import Stage, stage, stages
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.problem.gemm import DTYPES, GemmProblem
from cutex.sim import simulate
from cutex.tracing import tracing

LADDERS = [s for name in ARCHS for s in stages(name)]
each_stage = pytest.mark.parametrize(
    "stage", LADDERS, ids=[f"{s.arch}-{s.number}" for s in LADDERS]
)


def disassemble(compiled: Compiled) -> str:
    try:
        return sass(compiled)
    except NoDisassembler as missing:
        pytest.skip(str(missing))


# the compiled code


@pytest.mark.sweep(144)
@pytest.mark.parametrize("dtype", DTYPES)
@each_stage
def test_no_stage_spills_or_overflows_its_sm(stage: Stage, dtype: str) -> None:
    r = resources(compile(stage.kernel(), dtype, stage.arch))
    gpu = arch(stage.arch)
    assert r.spill_bytes == 0
    assert 0 < r.registers <= 255 and r.registers * r.num_threads <= 65536
    assert stage.config().smem_bytes < r.smem_bytes <= gpu.smem_per_cta
    config = stage.config()
    columns = config.num_acc * config.tile_n if isinstance(config, Sm100Config) else 0
    assert r.tmem_columns == columns


@pytest.mark.parametrize("asks", [True, False])
def test_a_compilation_does_not_look_for_a_gpu_that_torch_does_not_see(monkeypatch, asks) -> None:
    """With `asks` it is as the DSL has it, which looks for one many times."""
    environment, asked = CuTeDSL._get_dsl().envar, []
    monkeypatch.setattr(environment, "_arch", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    none = (driver.CUresult.CUDA_ERROR_NO_DEVICE,)
    monkeypatch.setattr(driver, "cuInit", lambda flags: asked.append(flags) or none)
    if asks:
        monkeypatch.setattr("cutex.compile.compiling.no_gpu_looked_for", nullcontext)
    compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a", cache=False)
    assert asked if asks else not asked
    assert asks or environment._arch is None, "other users of the DSL in this process may look"


@pytest.mark.slow
def test_what_is_traced_fast_is_what_the_dsl_traces_locations_included(monkeypatch) -> None:
    kernel = stage("sm_100a", 6).kernel()
    fast = compile(kernel, "bf16", "sm_100a", cache=False)
    monkeypatch.setattr("cutex.compile.compiling.tracing", nullcontext)
    slow = compile(kernel, "bf16", "sm_100a", cache=False)
    assert fast.ptx.count(".loc") > 100
    assert with_stacks(fast.ptx) == with_stacks(slow.ptx)


def with_stacks(ptx: str) -> list[str]:
    """The lines, with call stacks instead of their numbers, which count those of places too at
    which the DSL builds nothing."""
    calls, files = debug_info_of(ptx).calls, dict(_FILE.findall(ptx))
    lines = []
    for line in ptx.partition(_MARK)[0].splitlines():
        if at := _LOC.match(line):
            file, number, column = at.groups()
            line = f".loc {calls.get((files[file], int(number), int(column)), line)}"
        lines.append(line)
    return lines


def test_tracing_leaves_the_dsl_and_the_collector_as_they_were() -> None:
    def state() -> tuple[object, ...]:
        looked_up = op._get_caller_frame_info, op._get_location_from_frame_info
        return *looked_up, ArithValue.__init__, gc.isenabled()

    before = state()
    with suppress(ZeroDivisionError), tracing():
        assert not any(x == y for x, y in zip(before, state(), strict=True))
        _ = 1 / 0
    assert state() == before


@pytest.mark.sweep(48)
@each_stage
def test_a_kernel_bears_the_name_of_its_stage_and_not_that_of_cutlass(stage: Stage) -> None:
    compiled = compile(stage.kernel(), "bf16", stage.arch)
    kernel = resources(compiled).kernel
    assert kernel.startswith(stage.arch.replace("_", "").rstrip("a") + "_gemm_bf16_stage")
    assert kernel in compiled.ptx
    assert "cutlass" not in kernel  # it makes ptxas choose registers by other rules


@pytest.mark.sweep(12)
@each_stage
def test_one_compiled_kernel_serves_all_shapes(stage: Stage) -> None:
    compiled = compile(stage.kernel(), "bf16", stage.arch)
    for m, n, k in ((40, 24, 16), (264, 136, 72)):
        problem = GemmProblem(m, n, k, init="int")
        a, b = problem.inputs()
        c = problem.output()
        simulate(compiled, a, b, c)
        assert problem.check(a, b, c).ok


@pytest.mark.sweep(2)
@pytest.mark.parametrize("number", [2, 3])
def test_wgmma_groups_overlap(number: int) -> None:
    """ptxas waits after every single wgmma if it cannot prove the accumulators untouched."""
    compiled = compile(stage("sm_90a", number).kernel(), "bf16", "sm_90a")
    waits = sum(op.startswith("WARPGROUP.DEPBAR") for op in opcodes(disassemble(compiled)))
    assert waits == compiled.ptx.count("wgmma.wait_group")


def test_sass_is_counted_by_class() -> None:
    text = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 STG.E desc[UR4][R4.64], R25 ;
        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/                   NOP ;
    .L_x_0:
    """
    counts = count_instructions(text)
    assert (counts["mma"], counts["mma wait"], counts["barrier"]) == (1, 1, 1)
    assert (counts["global store"], counts["spill store"], counts["total"]) == (1, 0, 5)


def test_without_a_disassembler_the_rest_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PATH", "")
    r = resources(compiled)
    assert r.registers > 0 and not r.instructions
    assert "pip install nvidia-cuda-nvdisasm" in str(r)


# refused arguments


def test_a_kernel_compiles_for_its_own_arch_only() -> None:
    with pytest.raises(
        ValueError, match="sm90_gemm_stage0 is a kernel for sm_90a, not for sm_100a"
    ):
        compile(stage("sm_90a", 0).kernel(), "bf16", "sm_100a")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype 'fp32' is not one of bf16, fp16"):
        compile(stage("sm_90a", 0).kernel(), "fp32", "sm_90a")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Sm90Config(tile_m=64), "tile_m=64"),
        (Sm90Config(tile_n=264), "tile_n=264"),
        (Sm90Config(k_bytes=64), "k_bytes=64"),
        (Sm90Config(num_stages=0), "num_stages=0"),
        (Sm90Config(tile_n=256, num_stages=5), "more than the 232448"),
    ],
)
def test_a_config_that_does_not_fit_says_why(config: Sm90Config, reason: str) -> None:
    assert reason in (config.why_not(None, arch("sm_90a")) or "")
    with pytest.raises(ValueError, match=reason):
        stage("sm_90a", 0).kernel(config)


def test_a_ring_of_one_slot_cannot_turn() -> None:
    with pytest.raises(ValueError, match="num_stages=1: sm90_gemm_stage2 needs at least 2"):
        stage("sm_90a", 2).kernel(Sm90Config(num_stages=1))


def test_sizes_beyond_32_bits_do_not_fit() -> None:
    config = stage("sm_90a", 3).config()
    assert "32-bit" in (config.why_not(GemmProblem(2**31 - 8, 8, 8), arch("sm_90a")) or "")
    assert "tiles" in (config.why_not(GemmProblem(8, 2**25, 8), arch("sm_90a")) or "")
    assert config.why_not(GemmProblem(8192, 8192, 4096), arch("sm_90a")) is None


def matrix(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(m, n, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "error", "sentence"),
    [
        ((matrix(8, 8), matrix(8, 8)), TypeError, "takes mA, mB, mC, got 2 arguments"),
        ((1, matrix(8, 8), matrix(8, 8)), TypeError, "mA must be a torch.Tensor, got int"),
        (
            (matrix(8, 8, torch.float16), matrix(8, 8), matrix(8, 8)),
            TypeError,
            "mA must be torch.bfloat16, got torch.float16",
        ),
        ((matrix(8, 8),) * 3, ValueError, "mA must be on a CUDA device, got cpu"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    tensors: tuple, error: type[Exception], sentence: str
) -> None:
    compiled = compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a")
    with pytest.raises(error) as refused:
        compiled(*tensors)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("contiguous", "units"), [(-1, [1, 8]), (-2, [8, 1])])
def test_of_a_whole_operand_the_contiguous_size_alone_is_a_multiple(
    contiguous: int, units: list[int]
) -> None:
    (x,) = fake_arguments((Operand("b", ("k", "n"), "bf16", contiguous),))
    assert [size.divisibility for size in x.shape] == units


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (matrix(8, 8)[0], matrix(8, 8), "mA must be a matrix, got 1 dimensions"),
        (matrix(0, 8), matrix(8, 8), "mA has M=0, every size must be at least 1"),
        (matrix(8, 8), matrix(8, 16), "mB has K=16, but mA has 8"),
        (matrix(8, 16).T, matrix(8, 8), "mA must have contiguous rows, got strides (1, 16)"),
        (matrix(8, 16)[:, :12], matrix(8, 12), "mA has K=12, which must be a multiple of 8"),
        (matrix(8, 12)[:, :8], matrix(8, 8), "mA must start at, and step its rows by, a multiple"),
        (
            matrix(8, 16)[:, 4:12],
            matrix(8, 8),
            "mA must start at, and step its rows by, a multiple",
        ),
    ],
)
def test_wrong_shapes_are_refused_in_one_sentence(
    a: torch.Tensor, b: torch.Tensor, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(ValueError) as refused:
        compiled.check(a, b, matrix(8, 8))
    assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)


# the cache on disk


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk, and an empty one in this process."""
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cutex.compile.compiling._in_process", {})
    return tmp_path / "cache"


def compile_again(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Compile stage 0 as another process would."""
    monkeypatch.setattr("cutex.compile.compiling._in_process", {})
    return compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a")


def test_a_second_process_finds_the_kernel_on_disk(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_again(monkeypatch)
    second = compile_again(monkeypatch)
    assert not first.from_cache and second.from_cache
    assert second.object_path.is_relative_to(fresh_cache)
    assert (first.symbol, first.ptx, first.cubin) == (second.symbol, second.ptx, second.cubin)
    assert f"__tvm_ffi_{first.symbol}".encode() in first.object_path.read_bytes()


def test_a_process_keeps_what_it_compiled(fresh_cache: Path) -> None:
    kernel = stage("sm_90a", 0).kernel()
    assert compile(kernel, "bf16", "sm_90a") is compile(kernel, "bf16", "sm_90a")


def test_without_cache_nothing_is_kept(fresh_cache: Path) -> None:
    compiled = compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a", cache=False)
    assert not fresh_cache.exists() and compiled.object_path.exists()


@pytest.mark.sweep(16)
@pytest.mark.parametrize("part", [*FILES.values(), "meta.json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        None,
    ],
    ids=["truncated", "empty", "one bit", "missing"],
)
def test_a_damaged_entry_is_built_anew(
    part: str,
    damage: Callable[[bytes], bytes] | None,
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = compile_again(monkeypatch)
    file = whole.object_path.parent / part
    content = file.read_bytes()
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(content))
    again = compile_again(monkeypatch)
    assert not again.from_cache
    assert again.ptx == whole.ptx and again.cubin == whole.cubin
    assert compile_again(monkeypatch).from_cache


def test_an_entry_of_another_key_is_not_trusted(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = compile(stage("sm_90a", 1).kernel(), "bf16", "sm_90a")
    mine = compile_again(monkeypatch)
    for file in other.object_path.parent.iterdir():
        (mine.object_path.parent / file.name).write_bytes(file.read_bytes())
    assert compile_again(monkeypatch).symbol == mine.symbol
    assert not json.loads((mine.object_path.parent / "meta.json").read_text())["name"].endswith("1")


@pytest.mark.slow
def test_everything_that_matters_is_in_the_key(fresh_cache: Path) -> None:
    keys = {
        compile(stage(name, number).kernel(config), dtype, name).key
        for name, number, config, dtype in [
            ("sm_90a", 0, None, "bf16"),
            ("sm_90a", 0, None, "fp16"),
            ("sm_90a", 0, Sm90Config(tile_n=64), "bf16"),
            ("sm_90a", 1, Sm90Config(tile_n=128), "bf16"),
            ("sm_100a", 0, None, "bf16"),
        ]
    }
    assert len(keys) == 5


def test_a_setting_of_the_dsl_is_in_the_key(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = compile_again(monkeypatch).key
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "40")
    assert compile_again(monkeypatch).key != key


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NoCache, match=r"cannot be written .*: set CUTEX_CACHE to a folder"):
        compile_again(monkeypatch)


COMPILE_STAGE_0 = """
from cutex.compile import compile
from cutex.kernels.gemm import stage
c = compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a")
print(c.from_cache, c.key)
"""


@pytest.mark.slow
def test_two_processes_compile_a_kernel_once(fresh_cache: Path, tmp_path: Path, root: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(root)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE_STAGE_0],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    answers = sorted(out.split()[0] for out, _ in outputs)
    assert answers == ["False", "True"]
    assert len({out.split()[1] for out, _ in outputs}) == 1
    stray = [f.name for f in tmp_path.iterdir() if f.name != "cache"]
    assert stray == [], "a compile leaves nothing in the working directory"
    entries = [f for f in (fresh_cache / "kernels").iterdir() if f.suffix != ".lock"]
    assert len(entries) == 1, "no scratch folder is left"
