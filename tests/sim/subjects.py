"""Kernels for mutants: each with inputs so large that every ring wraps and every CTA of a
persistent grid computes several tiles, and a check of its output. Attention's scores fall from key
to key, so that the code that scales its output runs as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch

from cutex.compile import compile
from cutex.device.epilogue.epilogue_ops import Activation, Add, Alpha, Amax, Bias, Scale
from cutex.kernels import gemm
from cutex.kernels.attention.forward import stage as attention_stage
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.forward import Forward as Forward90
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.forward import Forward as Forward100
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm90.general import General as General90
from cutex.kernels.gemm.sm100 import cost_model
from cutex.kernels.gemm.sm100.general import General as General100
from cutex.problem.attention import AttentionProblem
from cutex.problem.attention.case import AttentionCase
from cutex.problem.gemm import GemmProblem
from cutex.sim import SimError, SimReport, simulate
from cutex.sim.finding import Finding
from cutex.sim.machine.findings import Findings

ORDERS = ({}, {"order": "eager"}, {"order": "starved", "seed": 1}, {"order": "peer-late"},
          {"order": "random", "seed": 1})  # fmt: skip

LONGER = 10  # times as many instructions as the kernel itself, after which a mutant never ends


@dataclass
class Outcome:
    """The outcome of a run: "found", an "advisory", wrong "values" only, or "nothing"."""

    kind: str
    message: str = ""


@dataclass(frozen=True)
class Subject:
    """``build`` compiles the kernel; ``launch`` runs it by the function that it is given, and
    returns the error of the result, or None.
    """

    name: str
    build: Callable[[], Any]
    launch: Callable[[Callable[..., None], Any], str | None]

    @cached_property
    def kernel(self) -> Any:
        return self.build()

    @cached_property
    def unchanged(self) -> list[SimReport]:
        """The reports of the kernel itself."""
        return self._run(self.kernel)[1]

    @cached_property
    def known(self) -> set[tuple[str, str]]:
        """The advisories of the kernel itself, which say nothing of a mutant."""
        return {_key(a) for report in self.unchanged for a in report.advisories}

    def outcome(self, kernel: Any, **order: Any) -> Outcome:
        """The outcome of one run of the kernel, or of a mutant of it."""
        most = LONGER * max(report.instructions for report in self.unchanged) + 100_000
        try:
            with mock.patch.object(Findings, "add", _first):
                wrong, reports = self._run(kernel, max_instructions=most, **order)
        except SimError as error:
            return Outcome("found", str(error))
        told = [a for report in reports for a in report.advisories if a.rule != "parked wait"]
        new = [a for a in told if _key(a) not in self.known]
        if new:
            return Outcome("advisory", str(new[0]))
        return Outcome("values", wrong) if wrong else Outcome("nothing")

    def _run(self, kernel: Any, **how: Any) -> tuple[str | None, list[SimReport]]:
        """The error of the result, and a report for each launch."""
        reports: list[SimReport] = []
        launch = lambda *arguments: reports.append(simulate(kernel, *arguments, **how))
        wrong = self.launch(launch, self.kernel)
        assert reports, f"{self.name} launches another kernel than it has built"
        return wrong, reports


def _key(finding: Finding) -> tuple[str, str]:
    """What does not depend on the lines of the PTX, which a mutant changes."""
    return finding.rule, re.sub(r"PTX line \d+", "", finding.where)


def _first(
    self: Findings,
    rule: str,
    message: str,
    instruction: Any,
    advisory: bool = False,
    cause: int | None = None,
    remedy: str = "",
) -> None:
    """The replacement of `Findings.add` that ends the run at the first finding, but not at an
    advisory.
    """
    if not advisory:
        raise SimError(f"{rule}: {message}")
    _ADD(self, rule, message, instruction, advisory, cause, remedy)


_ADD = Findings.add


def _ladder(arch: str, number: int) -> Subject:
    """A stage of the GEMM ladder; persistent ones on two clusters, or on a third of the grid."""
    stage = gemm.stage(arch, number)
    config = stage.config()
    persistent = number >= (7 if arch == "sm_90a" else 6)
    if persistent:
        config = replace(config, num_ctas=2 if arch == "sm_90a" else 4)
    if config.tile_n > 192 and arch == "sm_90a":
        config = replace(config, tile_n=128)
    problem = GemmProblem(*((600, 264) if persistent else (200, 264)), 392, "bf16", "int")

    def launch(run: Callable[..., None], kernel: Any) -> str | None:
        a, b = problem.inputs("cpu")
        c = problem.output("cpu")
        run(a, b, c)
        check = problem.check(a, b, c)
        return None if check.ok else check.message

    build = lambda: compile(stage.kernel(config), "bf16", arch)
    return Subject(f"gemm {arch} {number}", build, launch)


def _integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def _differs(got: torch.Tensor, want: torch.Tensor) -> str | None:
    return None if torch.equal(got.float(), want.float()) else "out differs"


def _residual() -> Subject:
    """Hopper's ping-pong kernel on two clusters: a bias, a residual loaded by TMA, ReLU."""
    tiles = replace(
        gemm.stage("sm_90a", 8).config(), num_stages=3, num_ctas=4, epi_n=32, epi_stages=3
    )
    matrices = {name: OperandLayout(batched=True) for name in ("a", "b", "out")}
    add = Add("residual", "bf16", batched=True, whole=True)
    ops = (Bias("column", "bf16", whole=True), add, Activation("relu"))

    def launch(run: Callable[..., None], kernel: Any) -> str | None:
        a, b = _integers(2, 200, 264), _integers(2, 264, 512, seed=1)
        bias, held = _integers(512, seed=3), _integers(2, 200, 512, seed=2)
        out = torch.full_like(held, torch.nan)
        run(a, b, out, bias, held)
        want = (a.float() @ b.float() + bias.float() + held.float()).relu().to(torch.bfloat16)
        return _differs(out, want)

    config = GeneralConfig(tiles, **matrices, ops=ops)
    build = lambda: compile(General90(config), "bf16", "sm_90a")
    return Subject("matmul sm_90a bias, residual, relu", build, launch)


def _few_rows() -> Subject:
    """Hopper's kernel for few rows, K in two shares within a cluster."""
    tiles = replace(
        gemm.stage("sm_90a", 7).config(), tile_m=64, tile_n=128, num_stages=4, split_k=2,
        warpgroups=1, cluster_n=1,
    )  # fmt: skip
    config = GeneralConfig(tiles, ops=(Alpha(),))

    def launch(run: Callable[..., None], kernel: Any) -> str | None:
        a, b = _integers(64, 1032), _integers(1032, 264, seed=1)
        out = torch.full((64, 264), torch.nan, dtype=torch.bfloat16)
        run(a, b, out, 2.0)
        return _differs(out, (2 * (a.float() @ b.float())).to(torch.bfloat16))

    build = lambda: compile(General90(config), "bf16", "sm_90a")
    return Subject("matmul sm_90a split K", build, launch)


def _sm100(name: str, split_k: int, ops: tuple[Any, ...]) -> Subject:
    """Blackwell's general kernel: scales, a gate, the largest magnitude; or K in shares."""
    tiles = next(
        c
        for c in cost_model.configs("sm_100a")
        if (c.tile_m, c.tile_n, c.split_k, c.swap_ab) == (256, 128, split_k, False)
    )
    config = GeneralConfig(replace(tiles, num_ctas=4) if split_k > 1 else tiles, ops=ops)

    def launch(run: Callable[..., None], kernel: Any) -> str | None:
        m, k = (600, 520) if split_k == 1 else (600, 1544)
        a, b = _integers(m, k), _integers(k, 264, seed=1)
        want = a.float() @ b.float()
        passed: list[torch.Tensor] = []
        if ops:
            scale, held = _integers(m, seed=3).float(), _integers(m, 264, seed=2)
            largest = torch.zeros(1)
            want = scale[:, None] * want + held.float()
            passed = [scale, held, largest]
        out = torch.full((m, 264), torch.nan, dtype=torch.bfloat16)
        run(a, b, out, *passed)
        if ops and float(largest) != float(want.abs().max()):
            return "amax differs"
        return _differs(out, want.to(torch.bfloat16))

    build = lambda: compile(General100(config), "bf16", "sm_100a")
    return Subject(f"matmul sm_100a {name}", build, launch)


def _attention_stage(arch: str, number: int) -> Subject:
    problem = AttentionProblem(
        batch=1, seqlen_q=150, seqlen_k=264, heads_q=2, heads_kv=1, head_dim=64, head_dim_v=64,
        causal=True, init="falling",
    )  # fmt: skip
    stage = attention_stage(arch, number).fitted(problem)
    config = stage.config()
    if config.dispatch == "dynamic":
        config = replace(config, num_ctas=2)

    def launch(run: Callable[..., None], kernel: Any) -> str | None:
        inputs, (out, lse) = problem.inputs(), problem.outputs()
        problem.launcher(run, kernel.argument_names)(*inputs, out, lse)
        check = problem.check(*inputs, out, lse)
        return None if check.ok else check.message

    build = lambda: compile(stage.kernel(config), problem.dtype, arch)
    return Subject(f"attention {arch} {number}", build, launch)


def _forward(name: str, arch: str, config: Any) -> Subject:
    """A production kernel of attention with two CTAs, or one pair, for all tiles."""
    heads = 2 if config.dispatch == "dynamic" else 1
    case = AttentionCase(
        seqlen_q=520 if arch == "sm_100a" else 200, seqlen_k=264, heads_q=heads, heads_kv=heads,
        head_dim=64, head_dim_v=64, causal=True, window=(150, None), init="falling",
    )  # fmt: skip

    def launch(run: Callable[..., None], kernel: Any) -> str | None:
        inputs, (out, lse) = case.inputs(), case.outputs()
        counter = torch.zeros(2, dtype=torch.int32)
        passed = [counter] if config.dispatch == "dynamic" else []
        run(*inputs[:3], out, lse, *passed, case.softmax_scale, -case.window[0])
        check = case.check(inputs, out, lse)
        return check.message if not check.ok else "the counter is not zero" * bool(counter.any())

    kernel = Forward90 if arch == "sm_90a" else Forward100
    return Subject(
        f"attention {arch} {name}", lambda: compile(kernel(config), "bf16", arch), launch
    )


_SM90 = Sm90ForwardConfig(
    head_dim=64, head_dim_v=64, causal=True, window=(True, False), tile_n=64, num_ctas=2
)
_SM100 = Sm100ForwardConfig(
    head_dim=64, head_dim_v=64, causal=True, window=(True, False), tile_n=64, p_first=32, num_ctas=2
)
_SM100_PAIR = replace(_SM100, pair=True, dispatch="static", num_ctas=2)
_OPS = (Scale("scale", "row"), Add("held", "bf16"), Amax())

SUBJECTS = {
    s.name: s
    for s in (
        *(_ladder(arch, n) for arch in ("sm_90a", "sm_100a") for n in range(10)),
        _residual(),
        _few_rows(),
        _sm100("scale, add, amax", 1, _OPS),
        _sm100("split K", 2, ()),
        _attention_stage("sm_90a", 3),
        _attention_stage("sm_90a", 7),
        _attention_stage("sm_100a", 4),
        _forward("forward", "sm_90a", _SM90),
        _forward("forward", "sm_100a", _SM100),
        _forward("forward of pairs", "sm_100a", _SM100_PAIR),
    )
}
