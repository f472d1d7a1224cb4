"""Gradients by the Blackwell backward's kernels, simulated, against autograd in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from attention_gradients import definition, wide
from test_attention_backward import CASES, case_of, errors

import cutex
from cutex.arch import arch
from cutex.kernels.attention.backward import stages
from cutex.kernels.attention.backward.choose import fitted
from cutex.kernels.attention.backward.sm100 import bounds
from cutex.kernels.attention.backward.sm100.config import TMEM_COLUMNS, Sm100BackwardConfig
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.ops.attention import differentiable, own_backward
from cutex.ops.attention.call import AttentionCall
from cutex.problem.attention.backward import BackwardProblem
from cutex.problem.attention.case import AttentionCase
from cutex.problem.attention.randomized import draw

ARCH = "sm_100a"


@pytest.mark.sweep(56)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name):
    dims = HEAD_DIMS[(list(CASES).index(name) + 2) % len(HEAD_DIMS)]
    case = case_of(name, head_dim=dims[0], head_dim_v=dims[1])
    assert errors(case, of_lse=True, arch=ARCH) == []


@pytest.mark.slow
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "grouped heads", "softcap", "packed"])
def test_gradients_of_each_head_dim(name, dims):
    case = case_of(name, head_dim=dims[0], head_dim_v=dims[1], dtype="fp16")
    assert errors(case, arch=ARCH) == []


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "left window", "after the diagonal", "packed"])
def test_deterministic_gradients_are_right(name, dims):
    """CTAs wait for each other; none waits for one that never comes."""
    longer = {} if name == "packed" else {"seqlen_k": 300}
    case = case_of(name, head_dim=dims[0], head_dim_v=dims[1], **longer)
    assert errors(case, order="random", seed=4, arch=ARCH, deterministic=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_deterministic_adds_come_in_one_order(dims):
    """Under any order of CTAs the bits are the same."""
    sizes = {"seqlen_q": 150, "seqlen_k": 400, "head_dim": dims[0], "head_dim_v": dims[1]}
    case = AttentionCase(heads_q=1, heads_kv=1, **sizes)
    found = []
    for seed in range(3):
        q, k, v = (x.detach().requires_grad_() for x in case.inputs()[:3])
        with cutex.ops.simulated(ARCH, order="random", seed=seed):
            out = cutex.flash_attn_func(q, k, v, deterministic=True)
            out.backward(torch.ones_like(out))
        found.append(q.grad)
    assert all(torch.equal(found[0], x) for x in found[1:])


@pytest.mark.slow
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("order", ["random", "starved", "eager"])
def test_gradients_under_other_orders(order, dims):
    case = case_of("causal", head_dim=dims[0], head_dim_v=dims[1], heads_q=2)
    assert errors(case, order=order, seed=3, arch=ARCH) == []


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(40, 40), (64, 128), (136, 72), (200, 200)], ids=str)
def test_gradients_of_head_dims_between_those_of_kernels(dims):
    """Columns that the tensors do not have are read as 0, and not written."""
    case = case_of("packed", head_dim=dims[0], head_dim_v=dims[1], softcap=2.0)
    assert errors(case, of_lse=True, arch=ARCH) == []


@pytest.mark.slow
def test_gradients_on_a_b300():
    assert errors(case_of("causal"), arch="sm_103a") == []


class Definition:
    """A stand-in of `planned`: the forward's O and LSE are those of float64, rounded, so that only
    backward kernels are compiled and run."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case

    def attend(self, call: AttentionCall, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            out, lse = definition(self.case, wide(self.case.inputs()))
        return out.to(call.q.dtype), lse.float()

    def plan_of(self, call: AttentionCall, with_lse: bool) -> None:
        return None


KERNELS, CASES_EACH = 20, 10


@pytest.mark.slow
@pytest.mark.parametrize("kernel", range(KERNELS))
def test_two_hundred_randomized_cases(kernel, monkeypatch):
    """Ten of each kernel, every fifth with longer sequences."""
    of_lse, options = kernel % 2 == 1, {"deterministic": kernel % 3 == 0}
    arch = "sm_103a" if kernel % 10 == 9 else ARCH
    for number in range(CASES_EACH):
        order = ("fifo", "random", "starved", "eager")[number % 4]
        sizes = (8.7, 2**23) if number % 5 == 4 else (7.5, 2**22)
        case = draw(CASES_EACH * kernel + number, *sizes, kernel=kernel)
        monkeypatch.setattr(differentiable, "planned", Definition(case))
        found = errors(case, of_lse, order, seed=number, arch=arch, **options)
        assert found == [], case


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_configs_fit_a_cta(dims):
    d, dv = dims
    for name, softcap, deterministic in product((ARCH, "sm_103a"), (False, True), (False, True)):
        config = Sm100BackwardConfig(
            head_dim=d, head_dim_v=dv, softcap=softcap, deterministic=deterministic
        )
        assert fitted(config).why_not(arch=arch(name)) is None


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_stages_fit_a_cta(dims):
    problem = BackwardProblem(1, 256, 256, 2, 2, head_dim=dims[0], head_dim_v=dims[1])
    for stage in stages(ARCH):
        assert stage.fitted(problem).config().why_not(problem, arch(ARCH)) is None


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_what_shares_columns_of_tensor_memory_is_meant_to(dims):
    c = fitted(Sm100BackwardConfig(head_dim=dims[0], head_dim_v=dims[1]))
    places = [
        (0, c.tile_m), (c.dp_column, c.tile_m), (c.dv_column, c.dv_width),
        (c.dk_column, c.dk_width), *((column, c.dq_width) for column in c.dq_columns),
    ]  # fmt: skip
    taken = [set(range(first, first + count)) for first, count in places]
    together = set().union(*taken)
    assert max(together) < TMEM_COLUMNS
    over_dp = [x for x in taken[4:] if x & taken[1]]
    assert all(x <= taken[1] for x in over_dp)
    assert sum(map(len, taken)) - len(together) == c.dq_width * len(over_dp)
    assert len(over_dp) == (c.dq_over_dp or len(c.dq_columns) == 2)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_parts_of_dq_take_their_places_in_turn(dims):
    """A place's uses are counted without a gap over parts and blocks, whose parity is a phase."""
    c = fitted(Sm100BackwardConfig(head_dim=dims[0], head_dim_v=dims[1]))
    uses = {place: [] for place in range(len(c.dq_columns))}
    for i in range(5):
        for part in range(c.dq_parts):
            uses[part % len(c.dq_columns)].append(c.dq_use(i, part))
    assert all(found == list(range(len(found))) for found in uses.values())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Sm100BackwardConfig(tile_m=96), "tile_m=96: 64 or 128 queries"),
        (Sm100BackwardConfig(num_stages=1), "num_stages=1: ahead=True holds Q of two blocks"),
        (Sm100BackwardConfig(dq_width=48), "dq_width=48: a multiple of 32 that divides 128"),
        (Sm100BackwardConfig(head_dim=256, head_dim_v=256), "tile_m=128: 768 columns of tensor"),
        (Sm100BackwardConfig(head_dim=96, head_dim_v=96, early_s=True), "early_s=True: for halves"),
        (Sm100BackwardConfig(head_dim=80), "head dim 80/128: there are kernels for 64"),
    ],
)
def test_a_config_that_does_not_fit_says_why(config, message):
    assert message in (config.why_not(arch=arch(ARCH)) or "")


def test_bounds_of_a_block_are_those_of_the_arithmetic():
    """Head dim 64, 128 queries: five products of 64, and twice 16 more of K to subtract."""
    c = bounds.config_of("full", 64, 64)
    found = bounds.cycles(c, ARCH)
    products = 5 * 64 + 2 * 16
    assert found["MMA"] == 2 * 128 * 128 * products / 8192
    assert found["MUFU"] == 128 * 128 / 16 == 2 * bounds.cycles(c, "sm_103a")["MUFU"]
    kilobytes = {
        "S, dP": 4 * 16 + 4 * 4, "B of dV, dK": 2 * 16, "dQ": 32 + 16, "dS": 32, "TMA": 2 * 16 + 2,
    }  # fmt: skip
    assert found["smem"] == sum(kilobytes.values()) * 1024 / 128
    late = bounds.cycles(replace(c, late_dk=True), ARCH)
    assert late["smem"] - found["smem"] == 32 * 1024 / 128  # dS^T as A of dK


def test_the_page_of_bounds_is_what_the_rows_render(root):
    page, rows = (root / bounds.PAGE).read_text(), bounds.read(root / bounds.FILE)
    assert page == bounds.with_part(page, bounds.part(rows, bounds.between_marks(page)))
    assert rows and {(r.arch, r.kind, r.head_dim, r.head_dim_v) for r in rows} == {*bounds.cases()}
    assert not any(any(r.spill_bytes) for r in rows)


@pytest.mark.slow
@pytest.mark.parametrize("key", [k for k in bounds.cases() if k[1] in ("full", "causal")], ids=str)
def test_the_rows_of_bounds_are_those_of_the_code(key, root):
    assert bounds.row(*key) in bounds.read(root / bounds.FILE)


class OnBlackwell:
    """A stand-in of q on a GPU: its device alone is looked at."""

    device = torch.device("cuda", 0)


def test_on_a_gpu_torch_is_taken_where_it_can(monkeypatch):
    """Until the kernels were timed on one."""
    monkeypatch.setattr(own_backward, "arch_name", lambda device: ARCH)
    for reason, ours in ((None, False), ("softcap, which torch does not know", True)):
        monkeypatch.setattr(own_backward.torch_backward, "why_not", lambda call, it=reason: it)
        call = AttentionCall(q=OnBlackwell(), k=None, v=None)
        assert (own_backward.why_not(call) is None) == ours
