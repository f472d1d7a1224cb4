"""The operators of cutex. Importing this loads neither torch nor the DSL."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from cutex.problem.protocol import BESIDE_SIZES, Check, Launch, PeerKernel, Problem, Sizes
from cutex.problem.work import Work


class Operator(NamedTuple):
    """The address of an operator."""

    problem: str  # its Problem, as module:Class
    kernels: str  # the package that has its LADDERS; an operator may live below another


# by name, in the order in which reports show them; the first is the default of commands
OPS = {
    "gemm": Operator("cutex.problem.gemm:GemmProblem", "cutex.kernels.gemm"),
    "attention": Operator(
        "cutex.problem.attention:AttentionProblem", "cutex.kernels.attention.forward"
    ),
    "attention_backward": Operator(
        "cutex.problem.attention.backward:BackwardProblem", "cutex.kernels.attention.backward"
    ),
    "attention_decode": Operator(
        "cutex.problem.attention.decode:DecodeProblem", "cutex.kernels.attention.decode"
    ),
    "gemm_fp8": Operator("cutex.problem.scaled:Fp8Problem", "cutex.kernels.gemm.scaled.fp8"),
    "gemm_scaled": Operator("cutex.problem.scaled:BlockScaledProblem", "cutex.kernels.gemm.scaled"),
    "gemm_grouped": Operator(
        "cutex.problem.grouped_gemm:GroupedGemmProblem", "cutex.kernels.gemm.grouped"
    ),
    "gemm_fp32": Operator("cutex.problem.gemm_fp32:Fp32GemmProblem", "cutex.kernels.gemm.simt"),
    "reduce": Operator("cutex.problem.reduce:ReduceProblem", "cutex.kernels.reduce"),
    "softmax": Operator("cutex.problem.softmax:SoftmaxProblem", "cutex.kernels.softmax"),
    "norm": Operator("cutex.problem.norm:NormProblem", "cutex.kernels.norm"),
}
DEFAULT_OP = next(iter(OPS))

__all__ = [
    "BESIDE_SIZES", "DEFAULT_OP", "OPS", "Check", "Launch", "Operator", "PeerKernel", "Problem",
    "Sizes", "Work", "operator", "problem_class", "size_name",
]  # fmt: skip


def operator(op: str) -> Operator:
    """The address of an operator; ValueError for one that cutex does not have."""
    if op not in OPS:
        raise ValueError(f"op {op!r} is not one of {', '.join(OPS)}")
    return OPS[op]


def problem_class(op: str) -> type[Problem]:
    """The Problem of an operator; ValueError for one that cutex does not have."""
    module, _, name = operator(op).problem.partition(":")
    return getattr(import_module(module), name)


def size_name(op: str, sizes: Sizes) -> str:
    """One word for the sizes of a problem, also of an operator that this version does not have."""
    try:
        return problem_class(op).size_name(sizes)
    except (ValueError, KeyError):
        return ",".join(f"{k}={v}" for k, v in sizes.items() if k not in BESIDE_SIZES)
