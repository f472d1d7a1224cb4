"""flash_attn_func on Blackwell, in the simulator, against float64, with Hopper's tolerances."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from flash_attn_calls import call
from test_attention import PLAIN, SIMULATOR, even_keys, hold, tilted

import cutex
from cutex.arch import arch
from cutex.compile import compile
from cutex.compile.resources import resources
from cutex.kernels.attention.forward.choose import fitted
from cutex.kernels.attention.forward.sm100 import bounds
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.forward import Forward
from cutex.kernels.attention.spec import HEAD_DIMS, AttentionSpec, Shape
from cutex.problem.attention.case import AttentionCase
from cutex.problem.attention.randomized import draw

SLOW = pytest.mark.slow
ORDERS = (*SIMULATOR.orders, {"order": "peer-late"}, {"order": "random", "seed": 7})
PLACE = replace(SIMULATOR, arch="sm_100a", orders=ORDERS)
LONG = Shape(batch=1, heads_q=4, heads_kv=4, longest_q=4096, longest_k=4096, mean_q=4096)


# ---- randomized cases


def hold_drawn(kernel: int, number: int, largest: float) -> None:
    case = draw(7000 + 2 * kernel + number, largest, PLACE.most_work, kernel)
    hold(PLACE, case, **ORDERS[(2 * kernel + number) % len(ORDERS)])


@pytest.mark.parametrize("kernel", [9])
def test_randomized_cases(kernel):
    hold_drawn(kernel, 0, largest=7.5)


@SLOW
@pytest.mark.parametrize("kernel", range(100, 175))
def test_150_randomized_cases(kernel):
    for number in range(2):
        hold_drawn(kernel, number, largest=9)


# ---- cases that random draws may miss


@SLOW
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_several_tiles_of_every_head_dim(head_dims, causal):
    d, dv = head_dims
    case = replace(PLAIN, head_dim=d, head_dim_v=dv, causal=causal, seqlen_q=600, seqlen_k=700)
    for order in ({}, {"order": "peer-late"}):
        hold(PLACE, case, **order)


@SLOW
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (257, 127), (383, 385), (600, 40), (64, 385)], ids=str
)
def test_causal_edges_of_tiles_and_rows_without_keys(queries, keys):
    hold(PLACE, replace(PLAIN, seqlen_q=queries, seqlen_k=keys))


@SLOW
@pytest.mark.parametrize("window", [(None, -100), (-70, 130), (200, -3), (-64, None)], ids=str)
def test_bands_off_the_diagonal(window):
    hold(PLACE, replace(PLAIN, causal=False, window=window, seqlen_q=300, seqlen_k=330))


@SLOW
@pytest.mark.parametrize("init", ["rising", "falling", "huge", "offset"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_scores_that_move_with_every_key_and_one_that_dwarfs_all(init, head_dim):
    case = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim, init=init)
    hold(PLACE, replace(case, seqlen_q=300, seqlen_k=600))


@SLOW
def test_a_tile_taken_too_boldly_is_done_again_also_by_a_key_of_the_fma_units():
    """Blocks are taken from the last one down; a key of the first has the largest scores, either in
    a column computed by MUFU, or in one computed by FMA units."""
    case = replace(PLAIN, heads_q=1, causal=False, seqlen_q=300, seqlen_k=600)
    for key in range(32, 40):
        inputs = case.inputs()
        inputs.k[:, key] = 24 * inputs.q[:, 133, :1]
        with PLACE.prepared():
            out, lse = call(case, inputs)
        found = case.check(inputs, out, lse)
        assert found.ok, f"key {key}: {found.message}"


@SLOW
def test_nan_of_a_key_reaches_every_row_whatever_unit_takes_it():
    case = replace(PLAIN, heads_q=1, causal=False, seqlen_q=130, seqlen_k=600)
    for key in range(0, 8):
        inputs = case.inputs()
        inputs.k[:, key] = torch.nan
        with PLACE.prepared():
            out, lse = call(case, inputs)
        assert out.isnan().all() and lse.isnan().all(), key


@SLOW
def test_orders_do_not_change_a_bit():
    case = replace(PLAIN, seqlen_q=300, seqlen_k=330, batch=2)
    inputs = case.inputs()
    found = []
    for order in ORDERS:
        with PLACE.prepared(**order):
            found.append(call(case, inputs))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@SLOW
def test_users_functions():
    case = replace(PLAIN, causal=False, seqlen_q=70, seqlen_k=150, heads_kv=2)
    inputs = case.inputs()
    with PLACE.prepared():
        out, lse = call(case, inputs, score_mod=tilted, mask_mod=even_keys)
    q, k, v = (x[0].double().transpose(0, 1) for x in inputs[:3])
    far = (torch.arange(70)[:, None] - torch.arange(150)).clamp(min=0)
    tilt = 0.0625 * far * torch.arange(1, 3)[:, None, None]
    scores = q @ k.mT / 8 - tilt
    scores[..., 1::2] = -torch.inf
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    want = scores.softmax(-1) @ v
    torch.testing.assert_close(out[0].double().transpose(0, 1), want, rtol=0.02, atol=0.01)


@SLOW
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_pairs_of_ctas_at_head_dim_128(causal):
    from test_attention_sm100_mutations import wrong

    config = Sm100ForwardConfig(causal=causal, window=(True, False), pair=True, dispatch="clc")
    kernel = compile(Forward(config), "bf16", "sm_100a")
    case = AttentionCase(
        seqlen_q=700, seqlen_k=600, heads_q=2, heads_kv=1, causal=causal, window=(400, None)
    )
    for order in ({}, {"order": "random", "seed": 5}, {"order": "peer-late"}):
        assert wrong(kernel, case, config, **order) is None


@SLOW
@pytest.mark.parametrize(
    "order", [{}, {"order": "starved"}, {"order": "random", "seed": 3}], ids=str
)
def test_clusters_take_over_tiles_that_have_not_begun(order):
    """The simulator holds a third of the grid, so two of three tiles are taken over."""
    from test_attention_sm100_mutations import wrong

    config = Sm100ForwardConfig(head_dim=64, head_dim_v=64, causal=True, window=(True, False))
    config = replace(config, dispatch="clc")
    kernel = compile(Forward(config), "bf16", "sm_100a")
    sizes = {"seqlen_q": 600, "seqlen_k": 330, "heads_q": 3, "heads_kv": 1}
    case = AttentionCase(**sizes, head_dim=64, head_dim_v=64, causal=True, window=(200, None))
    assert wrong(kernel, case, config, **order) is None


# ---- sm_103a


def test_a_b300_leaves_all_exponentials_to_mufu():
    spec = AttentionSpec(head_dim=64, head_dim_v=64)
    assert [fitted(spec, LONG, arch(x)).by_fma for x in ("sm_100a", "sm_103a")] == [4, 0]


@SLOW
@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128)], ids=str)
def test_a_b300_computes_the_same(head_dims):
    d, dv = head_dims
    case = replace(PLAIN, head_dim=d, head_dim_v=dv, seqlen_q=300, seqlen_k=400)
    hold(replace(PLACE, arch="sm_103a"), case, order="random", seed=1)


def test_matmul_says_that_a_b300_has_no_kernel_of_it():
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    with (
        cutex.ops.simulated("sm_103a"),
        pytest.raises(
            ValueError, match=r"'sm_103a': cutex.matmul has kernels for sm_90a, sm_100a, sm_80, "
        ),
    ):
        cutex.matmul(x, x)


# ---- the compiled code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dims", "causal"),
    [
        pytest.param(d, causal, marks=() if (d, causal) == ((128, 128), True) else SLOW, id=f"{d}")
        for d in HEAD_DIMS
        for causal in (False, True)
    ],
)
def test_nothing_is_spilled_and_smem_is_what_the_config_says(head_dims, causal):
    d, dv = head_dims
    config = fitted(AttentionSpec(d, dv, causal=causal), LONG, arch("sm_100a"))
    assert config.why_not(None, arch("sm_100a")) is None
    found = resources(compile(Forward(config), "bf16", "sm_100a"))
    assert found.spill_bytes == 0
    assert 0 <= found.smem_bytes - config.smem_bytes <= 1024
    assert found.tmem_columns >= config.columns


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head_dim": 80}, "there are kernels for"),
        ({"head_dim": 256, "head_dim_v": 256}, "columns of tensor memory, there are 512"),
        ({"tile_n": 144}, "a multiple of 32 from 64 to 128"),
        ({"p_first": 40}, "a multiple of 32, up to tile_n=128"),
        ({"pack": 3}, "must divide the 128 rows"),
        ({"pair": True}, "a pair takes clc, static or one"),
        ({"by_fma": 17}, "0 to 16"),
        ({"num_stages": 1}, "at least 2"),
        ({"q_tiles": 3}, "1 or 2"),
    ],
)
def test_a_config_that_cannot_be_says_why(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Forward(replace(Sm100ForwardConfig(), **change))


@SLOW
def test_four_heads_of_512_tokens_take_seconds():
    case = AttentionCase(seqlen_q=512, seqlen_k=512, causal=True)
    inputs = case.inputs()
    start = time.process_time()
    with cutex.ops.simulated("sm_100a"):
        call(case, inputs)
    assert time.process_time() - start < 25  # 5 s where it was measured, on one core


def test_the_page_of_bounds_is_what_the_rows_render(root):
    rows = bounds.read(root / bounds.FILE)
    assert (root / bounds.PAGE).read_text().startswith(bounds.page(rows))


def test_the_softmax_loop_is_not_longer_than_flash_attention_4s(root):
    rows = bounds.read(root / bounds.FILE)
    ours, theirs = (
        max(r.loop for r in rows if (r.kernel == "cutex") == mine and r.head_dim_v == 128
            and r.head_dim == 128)
        for mine in (True, False)
    )  # fmt: skip
    assert ours <= theirs


@SLOW
def test_the_rows_of_bounds_are_those_of_the_code(root):
    kept = [r for r in bounds.read(root / bounds.FILE) if r.kernel == "cutex"]
    found = [bounds.row(c) for c in bounds.configs()]
    assert found == kept


def test_bounds_of_a_block_are_those_of_the_arithmetic():
    row = bounds.Row(
        kernel="by hand", head_dim=128, head_dim_v=128, causal=False, ctas=1, q_tiles=2, tile_n=128,
        registers="", spill_bytes=0, smem_bytes=0, tmem_columns=512, by_mufu=96, loop=512,
    )  # fmt: skip
    assert row.cycles() == {"MMA": 2048, "MUFU": 1536, "smem": 2048, "issue": 1024}
    pair = replace(row, ctas=2)
    assert pair.cycles()["smem"] == 1280
