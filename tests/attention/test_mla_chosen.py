"""MLA decode of chosen keys, simulated, against float64: lists with gaps, of any length, rows that
nobody chose poisoned; arguments that do not fit."""

from __future__ import annotations

import pytest
import torch

import cutex

D, DV = 576, 512
CASES = {
    "two tokens, gaps": {"tokens": 2, "gaps": 0.3},
    "128 heads, topk_length": {"heads": 128, "lengths": (70, 0), "topk": 100},
    "odd heads, fp16, parts": {"heads": 3, "dtype": torch.float16, "num_splits": 2, "topk": 200},
    "no key at all": {"gaps": 1.0, "topk": 70},
    "a single key": {"topk": 1, "page_size": 1},
}


class Case:
    """A call's tensors, and what it should return, by float64."""

    def __init__(
        self, heads=16, tokens=1, topk=130, gaps=0.1, lengths=None, page_size=64, batch=2,
        num_splits=None, dtype=torch.bfloat16, seed=0, device="cpu", pages=5,
    ):  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        rows = pages * page_size
        self.q = torch.randn(batch, tokens, heads, D, generator=g).to(dtype).to(device)
        cache = torch.randn(rows, D, generator=g).to(dtype)
        chosen = torch.randint(0, rows, (batch, tokens, topk), generator=g)
        chosen = torch.where(chosen % 5 == 0, (chosen + 1) % rows, chosen)  # some are never chosen
        if rows > 5:
            cache[[r for r in range(rows) if not (chosen == r).any()]] = torch.nan
        hidden = torch.rand(chosen.shape, generator=g) < gaps
        below = torch.randint(-9, 0, chosen.shape, generator=g)
        beyond = torch.tensor([rows, rows + 1, 2**31 - 1, -(2**31)])
        beyond = beyond[torch.randint(0, 4, chosen.shape, generator=g)]
        none = torch.where(torch.rand(chosen.shape, generator=g) < 0.5, below, beyond)
        chosen = torch.where(hidden, none, chosen)
        self.indices = chosen.int().to(device)
        self.cache = cache.view(pages, page_size, 1, D).to(device)
        self.lengths = None
        if lengths is not None:
            self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.num_splits = num_splits

    def run(self, **more):
        given = {"indices": self.indices, "topk_length": self.lengths}
        given = {**given, "num_splits": self.num_splits, **more}
        return cutex.flash_mla_with_kvcache(self.q, self.cache, None, None, DV, **given)

    def expected(self):
        rows, topk = self.cache.flatten(0, 2).double(), self.indices.shape[2]
        counts = (self.indices >= 0) & (self.indices < len(rows))
        if self.lengths is not None:
            place = torch.arange(topk, device=self.indices.device)
            counts = counts & (place < self.lengths[:, None, None])
        k = rows[torch.where(counts, self.indices, 0).long()]  # (batch, tokens, topk, D)
        k = torch.where(counts[..., None], k, 0.0)
        scores = torch.einsum("bthd,btkd->bhtk", self.q.double(), k) * D**-0.5
        scores = scores.masked_fill(~counts[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse.clamp(min=-1e300)[..., None])
        out = torch.einsum("bhtk,btkd->bthd", p, k[..., :DV])
        return out, torch.where(lse == -torch.inf, torch.inf, lse)

    def outcome(self, **more) -> str:
        """What is wrong with the results; empty if nothing is."""
        (out, lse), (want, want_lse) = self.run(**more), self.expected()
        assert out.shape == want.shape and lse.shape == want_lse.shape
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


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_chosen_keys_are_attended_to(name):
    with cutex.ops.simulated("sm_90a"):
        assert Case(**CASES[name]).outcome() == ""


@pytest.mark.slow
@pytest.mark.parametrize(("order", "seed"), [("random", 1), ("starved", 0), ("eager", 0)])
def test_the_order_of_the_roles_does_not_matter(order, seed):
    case = Case(topk=400, batch=1, gaps=0.5)
    with cutex.ops.simulated("sm_90a", order=order, seed=seed):
        assert case.outcome(num_splits=1) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"heads": 3, "topk": 1500},
        {"heads": 16, "topk": 2100, "dtype": torch.float16},
        {"heads": 3, "tokens": 2, "topk": 1500, "gaps": 0.6},
        {"heads": 1, "topk": 700, "page_size": 16, "lengths": (650,)},
        {"heads": 2, "topk": 1500, "gaps": 1.0},
    ],
    ids=["three heads", "fp16", "two tokens", "pages of 16", "no key at all"],
)
@pytest.mark.parametrize(("order", "seed"), [("random", 1), ("random", 2), ("starved", 0)])
def test_ctas_with_parts_of_one_unit_merge_them(case, order, seed):
    case = Case(batch=1, pages=40, **case)
    with cutex.ops.simulated("sm_90a", order=order, seed=seed):
        assert case.outcome() == ""


BAD = {
    "causal=True: indices say which keys": {"causal": True},
    "indices has dtype torch.int64": {"indices": torch.zeros(2, 1, 4).long()},
    "indices has shape (2, 4), it must be (2, 1, topk)": {"indices": torch.zeros(2, 4).int()},
    "topk_length has shape (3,), it must be (2)": {"topk_length": torch.zeros(3).int()},
    "topk_length must be from 0 to 130": {"topk_length": torch.tensor([131, 0]).int()},
    "topk_length must be a torch.Tensor": {"topk_length": 3},
    "attn_sink is given": {"attn_sink": torch.zeros(16)},
    "topk_length is given without indices": {"indices": None, "topk_length": 3},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named_in_one_sentence(message):
    case = Case()
    with cutex.ops.simulated("sm_90a"), pytest.raises((TypeError, ValueError)) as error:
        case.run(**BAD[message])
    assert message in str(error.value) and "\n" not in str(error.value)
