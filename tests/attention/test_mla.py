"""MLA decode, simulated, against float64: pages with poison behind the lengths, parts, exact small
integers; arguments that do not fit."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kvcache_calls import table_of

import cutex
from cutex.compile.resources import all_resources
from cutex.kernels.attention.mla.choose import CONFIGS
from cutex.kernels.attention.mla.sm90.config import Sm90MlaConfig
from cutex.kernels.attention.mla.walk import MlaWalk
from cutex.ops.attention.mla import kernel_for
from cutex.sim import simulate

D, DV = 576, 512
ARCHS = "sm_90a", "sm_100a"
SMALL = {"heads": 16, "tokens": 1, "lengths": (100, 0, 65)}
CASES = {
    "two tokens, causal": {"tokens": 2, "causal": True},
    "one sequence, three heads": {"heads": 3, "lengths": (200,)},
    "128 heads": {"heads": 128, "lengths": (150,)},
    "odd heads, four tokens, pages of 16": {
        "heads": 33, "tokens": 4, "causal": True, "page_size": 16, "lengths": (70, 3)
    },
    "pages of 1": {"page_size": 1, "lengths": (70, 0)},
    "pages of 24": {"page_size": 24},
    "no pages": {"page_size": 0, "lengths": (130, 1)},
    "parts": {"num_splits": 3, "lengths": (200, 0, 65), "dtype": torch.float16},
    "192 rows, no pair": {"heads": 96, "tokens": 2, "lengths": (70,)},
    "interleaved heads of q": {"strided": True, "heads": 3, "tokens": 2},
}  # fmt: skip
QUICK = ("one sequence, three heads",)  # whose parts are merged by CTAs that wrote them


class Case:
    """A call's tensors, and what it should return, by float64."""

    def __init__(
        self, heads, tokens, lengths, causal=False, page_size=64, num_splits=None,
        dtype=torch.bfloat16, strided=False, integers=False, seed=0, device="cpu",
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape):
            if integers:
                return torch.randint(-1, 2, shape, generator=generator).to(dtype)
            return torch.randn(shape, generator=generator).to(dtype)

        batch, room = len(lengths), max(lengths)
        q = drawn(batch, tokens, 2 * heads if strided else heads, D)
        self.q = q
        self.rows = drawn(batch, room, 1, D)
        cache = self.rows.clone()
        for b, n in enumerate(lengths):
            cache[b, n:] = torch.nan
        table = None
        if page_size:
            table, pages = table_of(tuple(lengths), page_size, seed)
            cache = torch.full((pages, page_size, 1, D), torch.nan, dtype=dtype)
            for b, n in enumerate(lengths):
                for i in range(0, n, page_size):
                    rows = self.rows[b, i : min(i + page_size, n)]
                    cache[int(table[b, i // page_size]), : len(rows)] = rows
        self.q, self.rows, self.cache = (x.to(device) for x in (self.q, self.rows, cache))
        self.q = self.q[:, :, ::2] if strided else self.q
        self.table = None if table is None else table.to(device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.scale = 2.0**-6 if integers else None
        self.causal, self.num_splits = causal, num_splits

    def run(self, **more):
        metadata, splits = cutex.get_mla_metadata(self.lengths, 1, 1)
        assert splits is None
        given = {"causal": self.causal, "num_splits": self.num_splits, "softmax_scale": self.scale}
        return cutex.flash_mla_with_kvcache(
            self.q, self.cache, self.table, self.lengths, DV, metadata, **{**given, **more}
        )

    def expected(self):
        tokens = self.q.shape[1]
        scale = D**-0.5 if self.scale is None else self.scale
        out, lse = [], []
        for q, rows, n in zip(self.q.double(), self.rows.double(), self.lengths, strict=True):
            k = rows[:n, 0]
            scores = torch.einsum("qhd,kd->hqk", q, k) * scale
            if self.causal:
                seen = torch.ones(tokens, int(n), device=q.device).tril(int(n) - tokens) > 0
                scores = scores.masked_fill(~seen, -torch.inf)
            lse.append(scores.logsumexp(-1))
            p = torch.exp(scores - lse[-1].clamp(min=-1e300)[..., None])
            out.append(torch.einsum("hqk,kd->qhd", p, k[:, :DV]))
        lse = torch.stack(lse)
        return torch.stack(out), torch.where(lse == -torch.inf, torch.inf, lse)

    def outcome(self, **more) -> str:
        """What is wrong with the results; empty if nothing is."""
        out, lse = self.run(**more)
        want, want_lse = self.expected()
        assert out.shape == want.shape and lse.shape == want_lse.shape
        assert out.dtype == self.q.dtype and lse.dtype == torch.float32
        # P and O are rounded to 16 bits: |O| times a unit in the last place each, and their sum
        unit = torch.finfo(self.q.dtype).eps
        bound = unit * (want.abs() + want.abs().amax(-1, keepdim=True))
        wrong = ~((out.double() - want).abs() <= bound)
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            return f"out{at} is {out[*at]}, not {want[*at]}"
        if not torch.allclose(lse.double(), want_lse, rtol=1e-5, atol=1e-5):
            return f"lse is {lse}, not {want_lse}"
        return ""


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_latent_caches_are_attended_to(name, arch):
    with cutex.ops.simulated(arch):
        assert Case(**{**SMALL, **CASES[name]}).outcome() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "seed"), [("random", 1), ("random", 2), ("starved", 0), ("eager", 0)]
)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_order_of_the_roles_does_not_matter(order, seed, arch):
    case = Case(**{**SMALL, "lengths": (300, 190, 65), "tokens": 3, "causal": True})
    with cutex.ops.simulated(arch, order=order, seed=seed):
        assert case.outcome() == ""
        assert case.outcome(num_splits=1) == ""


def met(heads: int, lengths: tuple[int, ...], sms: int, **order: object) -> str:
    """What is wrong where CTAs that wrote parts merge them, a few CTAs; empty if nothing is."""
    config = replace(
        Sm90MlaConfig(num_sms=sms).fitted(heads, len(lengths)), combined=False, meets=True
    )
    case, batch = Case(heads, 1, lengths), len(lengths)
    out = torch.full((batch, 1, heads, DV), torch.nan).bfloat16()
    lse = torch.full((batch, heads, 1), torch.nan)
    units = batch * -(-heads // config.tile_m)
    sums = torch.full((2 * sms * 64 * (DV + 1),), torch.nan)
    flags = torch.zeros(units * config.flags_of_unit, dtype=torch.int32)
    how = case.lengths, case.table, D**-0.5, 0, sums, flags
    simulate(kernel_for(config, "bf16", "sm_90a"), case.q, case.cache, out, lse, *how, **order)
    assert not flags.any()  # for the next launch
    case.run = lambda: (out, lse)
    return case.outcome()


def test_parts_are_merged_by_ctas_that_wrote_them_where_each_has_a_row_at_most():
    config = Sm90MlaConfig()
    assert config.fitted(16, 1, room=2048).meets
    assert config.fitted(128, 1, room=32768).meets  # two units, 66 parts of 64 rows
    assert not config.fitted(16, 4, room=1024).meets
    assert config.fitted(16, 4, room=2048).meets
    assert not config.fitted(16, 8, room=32768).meets  # hardly faster, slower where ragged
    assert not config.fitted(16, 1, num_splits=3, room=2048).meets  # one CTA may have several
    assert not replace(config, causal=True).fitted(16, 1, room=2048).meets
    for found in (config.fitted(16, 1, room=2048), config.fitted(16, 100, num_splits=3)):
        assert not found.combined


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [{}, {"order": "random", "seed": 3}, {"order": "starved"}, {"order": "eager"}], ids=str
)
@pytest.mark.parametrize(
    ("heads", "lengths", "sms"),
    [(20, (400, 70, 0, 130), 3), (3, (900,), 7), (70, (500, 1), 6), (128, (300, 200), 4)],
)
def test_ctas_that_wrote_parts_merge_them(heads, lengths, sms, order):
    assert met(heads, lengths, sms, **order) == ""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_small_integers_are_exact(arch):
    """All keys alike, of numbers whose sums need no rounding: the output is the key."""
    case = Case(16, 1, (100, 64), integers=True)
    for b, n in enumerate((100, 64)):
        case.rows[b] = case.rows[b, :1]
        for i in range(n):
            page = int(case.table[b, i // 64])
            case.cache[page, i % 64] = case.rows[b, 0]
    with cutex.ops.simulated(arch):
        out, lse = case.run()
    want, want_lse = case.expected()
    assert torch.equal(out.double(), want.round())
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_scores_of_any_size_are_right(arch):
    """A hot key anywhere, and rows that begin far below it."""
    case = Case(**{**SMALL, "lengths": (260, 130)})
    hot = random.Random(0)
    for b, n in enumerate((260, 130)):
        i = hot.randrange(n)
        case.rows[b, i] *= 30
        case.cache[int(case.table[b, i // 64]), i % 64] = case.rows[b, i]
    with cutex.ops.simulated(arch):
        assert case.outcome() == ""
        assert case.outcome(num_splits=2) == ""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(arch):
    case = Case(**{**SMALL, "lengths": (200, 30, 65)})
    with cutex.ops.simulated(arch):
        whole = case.run(num_splits=2)
        case.q, case.table, case.lengths = case.q[:1], case.table[:1], case.lengths[:1]
        alone = case.run(num_splits=2)
    assert all(torch.equal(x[:1], y) for x, y in zip(whole, alone, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_register_is_spilled(arch, rows, dtype):
    for room in (0, 1 << 15) if arch == "sm_90a" else (0,):  # CTAs that wrote parts merge them
        config = CONFIGS[arch](causal=rows > 16 and not room).fitted(rows, 1, room=room)
        assert config.combined == (room == 0)
        compiled = kernel_for(config, dtype, arch)
        assert not any(x.spill_bytes for x in all_resources(compiled))


@pytest.mark.parametrize(
    ("quota", "longest", "shortest", "share"),
    [
        (128, 66, 66, 132),  # 128 of 4096 keys, 66 pairs of CTAs: two whole units each
        (64, 66, 66, 66),
        (126, 130, 7, 130),  # one each, whatever the others' lengths
        (128, 66, 65, 128),  # shares of two of them would end in others
        (100, 66, 66, 100),  # too much longer
        (1, 3, 3, 1),
    ],
)
def test_a_share_is_whole_units_where_it_is_hardly_longer(quota, longest, shortest, share):
    walk = MlaWalk(None, None, SimpleNamespace(num_splits=0), None)
    assert walk.uncut(quota, longest, shortest, False) == (share, 0)


def test_without_queries_or_keys_nothing_is_launched():
    case = Case(**SMALL)
    with cutex.ops.simulated("sm_90a"):
        out, lse = cutex.flash_mla_with_kvcache(
            case.q, case.cache, case.table[:, :0], torch.zeros(3, dtype=torch.int32)
        )
        assert not out.any() and (lse == torch.inf).all()
        out, lse = cutex.flash_mla_with_kvcache(case.q[:, :0], case.cache, case.table, case.lengths)
    assert out.shape == (3, 0, 16, DV) and lse.shape == (3, 16, 0)


# ---- arguments


def given(**more):
    q, cache = torch.zeros(2, 1, 16, D).half(), torch.zeros(3, 64, 1, D).half()
    table, lengths = torch.tensor([[0], [2]], dtype=torch.int32), torch.tensor([3, 64]).int()
    return {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lengths, **more}


BAD = {
    "q must be a torch.Tensor, got list": {"q": [1]},
    "q has dtype torch.float32, which is not": {"q": torch.zeros(2, 1, 16, D)},
    "k_cache has dtype torch.bfloat16, but q has torch.float16": {
        "k_cache": torch.zeros(3, 64, 1, D).bfloat16()
    },
    "q has shape (2, 1, 16, 512), it must be (batch, tokens, heads, 576)": {
        "q": torch.zeros(2, 1, 16, 512).half()
    },
    "k_cache has shape (3, 64, 576), it must be (pages, page size, 1, 576)": {
        "k_cache": torch.zeros(3, 64, D).half()
    },
    "k_cache has shape (3, 64, 2, 576), it must be": {"k_cache": torch.zeros(3, 64, 2, D).half()},
    "k_cache cannot be read in place: its head dim has stride": {
        "k_cache": torch.zeros(3, 1, D, 64).half().permute(0, 3, 1, 2)
    },
    "k_cache has batch size 3, but q has 2": {"block_table": None},
    "block_table has dtype torch.int64": {"block_table": torch.zeros(2, 1).long()},
    "block_table has shape (2,), it must be (2, pages)": {"block_table": torch.zeros(2).int()},
    "block_table[1] has page 3, k_cache has pages 0 to 2": {
        "block_table": torch.tensor([[0], [3]]).int()
    },
    "cache_seqlens must be a torch.Tensor, got NoneType": {"cache_seqlens": None},
    "cache_seqlens has shape (3,), it must be (2,)": {"cache_seqlens": torch.zeros(3).int()},
    "cache_seqlens must be from 0 to the 64 keys": {"cache_seqlens": torch.tensor([3, 65]).int()},
    "head_dim_v=576: there is a kernel for 512 only": {"head_dim_v": 576},
    "num_splits must be None or an int, got float": {"num_splits": 2.0},
    "num_splits=-1: must be from 0 to 256": {"num_splits": -1},
    "softmax_scale=0: must be positive": {"softmax_scale": 0},
    "causal must be True or False, got 1": {"causal": 1},
    "is_fp8_kvcache=True: there is a kernel for": {"is_fp8_kvcache": True},
    "attn_sink is given: there is no kernel": {"attn_sink": torch.zeros(16)},
    "unexpected keyword argument 'pages'": {"pages": 1},
    "has no gradient": {"q": torch.zeros(2, 1, 16, D).half().requires_grad_()},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named_in_one_sentence(message):
    with cutex.ops.simulated("sm_90a"), pytest.raises((TypeError, ValueError)) as error:
        cutex.flash_mla_with_kvcache(**given(**BAD[message]))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_on_another_gpu_it_says_where_it_runs():
    with pytest.raises(ValueError, match="q is on cpu: flash_mla_with_kvcache has kernels for"):
        cutex.flash_mla_with_kvcache(**given())
