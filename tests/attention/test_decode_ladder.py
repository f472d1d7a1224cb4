"""The ladder of attention to caches, and the work of its problems."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from cutex.compile import compile
from cutex.kernels.attention.decode import LADDERS
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.problem.attention.decode import DecodeProblem
from cutex.sim import simulate

DIMS = {"head_dim": 64, "head_dim_v": 64}


@pytest.mark.slow
@pytest.mark.parametrize("stage", LADDERS.rungs, ids=lambda s: f"{s.arch} {s.number}")
def test_a_stage_takes_ragged_pages(stage):
    sizes = {"batch": 3, "seqlen_q": 2, "seqlen_k": 300, "heads_q": 4, "heads_kv": 2}
    problem = DecodeProblem(**sizes, **DIMS, causal=True, page_size=16, ragged=True)
    assert len({*problem.lengths}) == 3
    inputs, outputs = problem.inputs(), problem.outputs()
    fitted = stage.fitted(problem)
    kernel = fitted.kernel()
    compiled = compile(kernel, problem.dtype, stage.arch)
    names = [a.name for a in kernel.operands(problem.dtype)]
    problem.launcher(partial(simulate, compiled), names)(*inputs, *outputs)
    found = problem.check(*inputs, *outputs)
    assert found.ok, found.message


def test_the_bytes_of_ragged_lengths_are_those_of_their_keys():
    sizes = {"batch": 3, "seqlen_q": 1, "seqlen_k": 640, "heads_q": 4, "heads_kv": 2}
    even, ragged = (DecodeProblem(**sizes, **DIMS, ragged=x) for x in (False, True))
    assert even.bytes - ragged.bytes == 2 * 2 * 128 * (3 * 640 - sum(ragged.lengths))
    assert ragged.flops == 2 * sum(ragged.lengths) * 4 * 128
    assert even.flops == 2 * 3 * 640 * 4 * 128
    config = DecodeConfig(head_dim=64, head_dim_v=64, tile_n=128)
    unit = 5 * 64 * 128 * 128 * 2  # tiles are whole: 64 rows for 2
    assert config.work(even) == (3 * 2 * unit, 0)  # units are cut
    assert replace(config, parts="one").work(even) == (3 * 2 * unit, unit)
    assert replace(config, parts="one").work(ragged)[1] == 0
    assert replace(config, packed=False).work(even)[0] == 2 * config.work(even)[0]
