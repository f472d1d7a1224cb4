"""The choice of an attention config for a spec, by arch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from cutex.kernels.attention.forward.config import ForwardConfig
from cutex.kernels.attention.forward.sm90 import choose as sm90
from cutex.kernels.attention.forward.sm100 import choose as sm100
from cutex.kernels.attention.spec import AttentionSpec, Shape

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.attention import AttentionProblem

FITTED: dict[str, Callable[[AttentionSpec, Shape, Arch], ForwardConfig]] = {
    "sm_90a": sm90.fitted,
    "sm_100a": sm100.fitted,
    "sm_103a": sm100.fitted,
}


def fitted(spec: AttentionSpec, shape: Shape, arch: Arch) -> ForwardConfig:
    """The config that computes `spec` for `shape` on a GPU with the SMs of `arch`, and with its L2,
    of which Q and O take a share."""
    config = FITTED[arch.name](spec, shape, arch)
    m_blocks = -(-shape.longest_q * config.pack // config.tile_m)
    tiles = m_blocks * (shape.heads_q // config.pack) * shape.batch
    if tiles <= arch.num_sms and not config.is_cut:
        config = replace(config, dispatch="one")  # there is nothing to hand out
    return replace(config, num_ctas=arch.num_sms, l2_bytes=arch.l2_bytes * 5 // 6)


def choose(problem: AttentionProblem, arch: Arch) -> ForwardConfig:
    """The config for a problem of the ladder."""
    left, right = problem.bounds
    spec = AttentionSpec(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal,
        window=(left is not None, right is not None and not problem.causal),
        varlen_q=problem.varlen,
        varlen_k=problem.varlen,
        softcap=bool(problem.softcap),
    )
    shape = Shape(
        problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q, problem.seqlen_k,
        problem.seqlen_q,
    )  # fmt: skip
    return fitted(spec, shape, arch)
