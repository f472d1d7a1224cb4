"""Every stage of the attention ladder, in the simulator, against float64."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from cutex.arch import arch
from cutex.compile import Compiled, compile
from cutex.compile.resources import resources
from cutex.kernels.attention.forward import Forward, Stage, stage, stages
from cutex.kernels.attention.forward.sm90.stage7 import Stage7
from cutex.kernels.attention.forward.sm90.stage8 import Stage8
from cutex.problem.attention import AttentionProblem
from cutex.sim import simulate

LADDER = [s for s in stages("sm_90a") if not isinstance(s, Forward)]
BLACKWELL = [s for s in stages("sm_100a") if not isinstance(s, Forward)]
PERSISTENT = [s.number for s in LADDER if s.config().dispatch == "dynamic"]
FOLDER = Path(__file__).parents[2] / "kernels" / "attention" / "forward"
SLOW = pytest.mark.slow


def each(in_ci: Collection[int]) -> pytest.MarkDecorator:
    """Parametrise over all stages; Hopper's other than these numbers have the slow marker."""
    return pytest.mark.parametrize(
        "stage",
        [
            *(
                pytest.param(s, id=str(s.number), marks=() if s.number in in_ci else SLOW)
                for s in LADDER
            ),
            *(pytest.param(s, id=f"{s.arch}-{s.number}", marks=SLOW) for s in BLACKWELL),
        ],
    )


each_stage = each({s.number for s in LADDER})
each_of_hopper = pytest.mark.parametrize(
    "stage",
    [pytest.param(s, id=str(s.number), marks=() if s.number in (2, 8) else SLOW) for s in LADDER],
)
SOME = {0, 4, 8}  # in order; roles and turns; persistent, with tiles done again
some_stages = each(SOME)
FULL_CAUSAL = ["full", "causal"]

PROBLEM = AttentionProblem(
    batch=1, seqlen_q=150, seqlen_k=200, heads_q=2, heads_kv=1, head_dim=64, head_dim_v=64
)


def sized(head_dim: int, causal: bool, **sizes) -> AttentionProblem:
    return replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim, causal=causal, **sizes)


@cache
def compiled(stage: Stage, dtype: str, **changes) -> Compiled:
    return compile(stage.kernel(replace(stage.config(), **changes)), dtype, stage.arch)


def run(
    stage: Stage, problem: AttentionProblem, inputs, order: str = "fifo", seed: int = 0, **changes
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of `inputs`; the simulator must find nothing to report."""
    stage = stage.fitted(problem)
    config = replace(stage.config(), **changes)
    assert config.why_not(problem, arch(stage.arch)) is None
    kernel = compiled(stage, problem.dtype, **changes)

    def launch(*arguments):
        report = simulate(kernel, *arguments, order=order, seed=seed)
        assert not report.findings, "\n".join(map(str, report.findings))

    out, lse = problem.outputs()
    problem.launcher(launch, kernel.argument_names)(*inputs, out, lse)
    return out, lse


def check(stage: Stage, problem: AttentionProblem, **how) -> None:
    inputs = problem.inputs()
    found = problem.check(*inputs, *run(stage, problem, inputs, **how))
    assert found.ok, found.message


# ---- right in every order of events


@pytest.mark.sweep(8)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@each({2, 8})
def test_o_and_lse_are_float64s(stage: Stage, causal: bool) -> None:
    check(stage, sized(128, causal))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [pytest.param(False, marks=SLOW), True], ids=FULL_CAUSAL)
@some_stages
def test_heads_of_64(stage: Stage, causal: bool) -> None:
    check(stage, sized(64, causal))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [pytest.param(False, marks=SLOW), True], ids=FULL_CAUSAL)
@some_stages
def test_nothing_depends_on_the_order_of_events(stage: Stage, causal: bool) -> None:
    """Five blocks of keys turn the rings more than once."""
    problem = sized(64, causal, seqlen_q=140, seqlen_k=520, heads_q=1)
    check(stage, problem, order="random", seed=stage.number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 5, 8])  # of Blackwell's, these hold the code of all
def test_blackwells_stages_in_a_random_order(number: int) -> None:
    problem = sized(64, True, seqlen_q=140, seqlen_k=150, heads_q=1)
    check(stage("sm_100a", number), problem, order="random", seed=number)


@pytest.mark.slow
@some_stages
def test_fp16_is_as_right_as_bf16(stage: Stage) -> None:
    check(stage, replace(sized(64, True), dtype="fp16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(s.number, marks=() if s.number in SOME else SLOW)
        for s in LADDER
        if s.number not in PERSISTENT
    ],
)
def test_heads_of_256_take_keys_by_64(number: int) -> None:
    check(stage("sm_90a", number), sized(256, True, seqlen_q=130, seqlen_k=150))


LENGTHS = {
    "one query, one key": (1, 1),
    "one query": (1, 300),
    "rows without keys": (400, 130),
    "whole blocks": (256, 256),
    "one key more": (128, 257),
}


@pytest.mark.sweep(36)
@pytest.mark.parametrize("causal", [pytest.param(False, marks=SLOW), True], ids=FULL_CAUSAL)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@some_stages
def test_ends_of_queries_and_keys(stage: Stage, lengths: tuple[int, int], causal: bool) -> None:
    seqlen_q, seqlen_k = lengths
    check(stage, sized(64, causal, seqlen_q=seqlen_q, seqlen_k=seqlen_k))


@pytest.mark.parametrize(
    "init", [*(pytest.param(x, marks=SLOW) for x in ("offset", "rising")), "huge"]
)
@some_stages
def test_scores_that_move_the_maximum(stage: Stage, init: str) -> None:
    check(stage, replace(sized(64, True, seqlen_q=200, seqlen_k=400, heads_q=1), init=init))


# ---- LSE


@some_stages
def test_lse_of_equal_scores_is_exact(stage: Stage) -> None:
    """With Q = 0 all exponentials are 1: their sum is the number of keys, O the mean of V."""
    problem = sized(64, True, seqlen_q=150, seqlen_k=200)
    _, k, v = problem.inputs()
    q, v = torch.zeros(1, 150, 2, 64, dtype=k.dtype), torch.ones_like(v)
    out, lse = run(stage, problem, (q, k, v))
    keys = torch.arange(51, 201)
    torch.testing.assert_close(lse[0, 0], keys.float().log(), rtol=2e-7, atol=0)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=0)


@some_stages
def test_rows_without_keys_have_o_0_and_lse_minus_infinity(stage: Stage) -> None:
    problem = sized(64, True, seqlen_q=400, seqlen_k=130)
    out, lse = run(stage, problem, problem.inputs())
    assert (out[:, :270] == 0).all() and (lse[..., :270] == -torch.inf).all()
    assert lse[..., 270:].isfinite().all()


# ---- persistent CTAs


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=SLOW)], ids=FULL_CAUSAL)
@pytest.mark.parametrize("number", PERSISTENT)
def test_few_ctas_walk_many_tiles(number: int, causal: bool) -> None:
    problem = sized(64, causal, batch=2, seqlen_q=200, seqlen_k=200)
    check(stage("sm_90a", number), problem, order="random", seed=number, num_ctas=3)


@pytest.mark.slow
@pytest.mark.parametrize("number", PERSISTENT)
def test_the_counter_is_left_as_it_was(number: int) -> None:
    problem = sized(64, False, seqlen_q=300)
    fitted = stage("sm_90a", number).fitted(problem)
    counter = torch.zeros(2, dtype=torch.int32)
    q, k, v = problem.inputs()
    for _ in range(2):
        out, lse = problem.outputs()
        simulate(compiled(fitted, "bf16", num_ctas=3), q, k, v, out, lse, counter, 0.125)
        assert not counter.any()
        assert problem.check(q, k, v, out, lse).ok


class Once(Stage8):
    """Stage 8 without the second try: its load warp does not read the rows' verdict."""

    number = 80
    load_tiles = Stage7.load_tiles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("causal", "dtype"),
    [
        (False, "bf16"),
        *(pytest.param(*x, marks=SLOW) for x in ((False, "fp16"), (True, "bf16"), (True, "fp16"))),
    ],
)
def test_a_tile_taken_too_boldly_is_done_again(causal: bool, dtype: str) -> None:
    """Blocks are taken from the last one down, and a key of the first has the largest scores."""
    problem = replace(sized(64, causal, seqlen_q=200, seqlen_k=500), dtype=dtype)
    q, k, v = problem.inputs()
    k[:, 40] = 24 * q[:, 133, :1]
    eighth = stage("sm_90a", 8).fitted(problem)
    found = problem.check(q, k, v, *run(eighth, problem, (q, k, v), num_ctas=3, order="random"))
    assert found.ok, found.message
    once = compile(Once(replace(eighth.config(), num_ctas=3)), dtype, "sm_90a", cache=False)
    out, lse = problem.outputs()
    simulate(once, q, k, v, out, lse, torch.zeros(2, dtype=torch.int32), 0.125)
    assert not problem.check(q, k, v, out, lse).ok


# ---- the compiled code

# By arch, stage, head dim and mask: a softmax thread's words of a tile, and at head dim 128 its
# reference, read once a block. Roles with 80, 192 and 48 registers spill nothing at head dim 64 and
# 32 bytes at 128; with a second product after half of P (p_first=64) it is the other way round.
SPILLED = {
    ("sm_100a", 7, 64, False): 16,
    ("sm_100a", 7, 64, True): 16,
    ("sm_100a", 7, 128, False): 8,
    ("sm_100a", 7, 128, True): 16,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("head_dim", [128, *(pytest.param(x, marks=SLOW) for x in (64, 256))])
@each({2, 8})  # those that another test here compiles
def test_nothing_is_spilled_and_smem_is_what_the_config_says(stage: Stage, head_dim: int) -> None:
    if head_dim == 256 and (stage in BLACKWELL or stage.number in PERSISTENT):
        why = "more than the 232448 that a CTA has|the ladder takes 64, 128"
        with pytest.raises(ValueError, match=why):
            stage.fitted(sized(256, True)).kernel()
        return
    for causal in (False, True):
        config = stage.fitted(sized(head_dim, causal)).config()
        found = resources(compile(stage.kernel(config), "bf16", stage.arch))
        assert found.spill_bytes == SPILLED.get((stage.arch, stage.number, head_dim, causal), 0)
        assert 0 <= found.smem_bytes - config.smem_bytes <= 1024


def products(stage: Stage) -> int:
    """wgmma groups in the code: Q K^T and P V of each step, of the first block and of the last."""
    steps = {6: 2, 7: 2, 8: 3}.get(stage.number, 1)
    return 2 * steps if stage.number < 4 else 2 * steps + 2


@pytest.mark.sweep(2)
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=SLOW), 128])
@each_of_hopper
def test_no_wgmma_waits_for_the_one_before(stage: Stage, head_dim: int) -> None:
    """One wait for each product: where ptxas has to serialize, it waits after every instruction."""
    config = stage.fitted(sized(head_dim, True)).config()
    found = resources(compile(stage.kernel(config), "bf16", stage.arch))
    if found.note:
        pytest.skip(found.note)
    assert found.instructions["mma wait"] == products(stage)


# ---- the table and its files


@pytest.mark.sweep(2)
@each_stage
def test_a_problem_that_only_the_top_takes_is_refused(stage: Stage) -> None:
    for change in ({"window": "63,0"}, {"softcap": 30.0}, {"varlen": True}, {"head_dim_v": 64}):
        problem = replace(sized(128, True), **change)
        config = stage.fitted(problem).config()
        assert "the top of the ladder" in config.why_not(problem, arch(stage.arch))


def test_files_are_short() -> None:
    for path in [*FOLDER.glob("sm*/stage*.py"), FOLDER / "launch.py", FOLDER / "ladder.py"]:
        assert len(path.read_text().splitlines()) <= 300, path.name
