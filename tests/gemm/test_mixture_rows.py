"""Rows to experts and weighted back: right to the second order, silent beside rows of no expert."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from cutex import ops
from cutex.ops.mixture.halves import gated_rows
from cutex.ops.mixture.routing import route
from cutex.ops.mixture.rows import combined_rows, spread_rows

bf16 = torch.bfloat16


def spread_in_torch(x: Tensor, tokens: Tensor, end: int) -> Tensor:
    return torch.cat([x[tokens[:end].long()], torch.zeros_like(x[tokens[end:].long()])])


def combined_in_torch(z: Tensor, weights: Tensor, places: Tensor, end: int) -> Tensor:
    known = (places < end)[..., None]
    return torch.where(known, z[places.clamp(max=end - 1).long()] * weights[..., None], 0).sum(1)


def near(found: Tensor, want: Tensor, unit: float) -> bool:
    return bool((found.double() - want).abs().max() <= unit * float(want.abs().max()))


@pytest.mark.parametrize(
    ("tokens", "per_token", "columns"),
    [(19, 2, 1032), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((300, 3, 40), (1, 1, 8)))],
)
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_rows_are_spread_and_combined_to_the_second_order(
    device: str, arch: str, tokens: int, per_token: int, columns: int
) -> None:
    """Rows of no expert are NaN where they are read from, and zeros in gradients."""
    place, g = ("cuda" if device == "cuda" else "cpu"), torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, 4, (tokens, per_token), generator=g).to(place)
    ids.view(-1)[4::5] = 7  # no expert

    def normal(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype).to(place)

    with ops.simulated(arch) if device == "sim" else nullcontext():
        routing = route(ids, 4)
        end, count = int(routing.offs[-1]), ids.numel()
        x, z, dy = normal(tokens, columns), normal(count, columns), normal(tokens, columns)
        weights, drows = normal(tokens, per_token, dtype=torch.float32), normal(count, columns)
        z[end:] = torch.nan
        drows[end:] = torch.inf
        given = [t.requires_grad_() for t in (x, z, weights, dy, drows)]
        rows, y = spread_rows(x, routing), combined_rows(z, weights, routing)
        dx, dz, dw = torch.autograd.grad((rows, y), given[:3], (drows, dy), create_graph=True)
        bars = normal(*dx.shape), normal(*dz.shape), normal(*dw.shape, dtype=torch.float32)
        second = torch.autograd.grad((dx, dz, dw), (z, weights, dy, drows), bars)
    wide = [t.detach().double().requires_grad_() for t in given]
    x_, z_, w_, dy_, drows_ = wide
    rows_ = spread_in_torch(x_, routing.tokens, end)
    y_ = combined_in_torch(torch.cat([z_[:end], 0 * z_[end:].detach()]), w_, routing.places, end)
    finite = torch.cat([drows_[:end], 0 * drows_[end:].detach().nan_to_num(posinf=0)])
    first_ = torch.autograd.grad((rows_, y_), wide[:3], (finite, dy_), create_graph=True)
    bars_ = [b.double() for b in bars]
    second_ = torch.autograd.grad(first_, (z_, w_, dy_, drows_), bars_)
    assert torch.equal(rows[:end], x[routing.tokens[:end].long()])
    assert near(y.detach(), y_.detach(), 2.0**-8)
    for found, want in zip((dx, dz, dw), first_, strict=True):
        assert near(found.detach(), want.detach(), 2.0**-8)
    assert not dz[end:].any()
    for found, want in zip(second, second_, strict=True):
        assert near(found, want, 2.0**-6)


@pytest.mark.parametrize("arch", ["sm_90a"])
def test_halves_are_gated_to_the_second_order(device: str, arch: str) -> None:
    """Gates of any size; rows of no group, NaN here, change nothing else."""
    place, g = ("cuda" if device == "cuda" else "cpu"), torch.Generator().manual_seed(1)
    h, dy, bars = (torch.randn((9, c), generator=g).to(bf16).to(place) for c in (2064, 1032, 2064))
    h[0, :8] = torch.tensor([0.0, -200.0, 200.0, -9.0, 9.0, 1e-30, -88.5, 3e38])
    h[0, 1032:1040] = 1.0
    offs = torch.tensor([2, 2, 7], dtype=torch.int32, device=place)
    h[7:], dy[7:] = torch.nan, torch.nan
    given = h.requires_grad_(), dy.requires_grad_()
    with ops.simulated(arch) if device == "sim" else nullcontext():
        y = gated_rows(h, offs)
        (dh,) = torch.autograd.grad(y, h, dy, create_graph=True)
        second = torch.autograd.grad(dh, given, bars)
    wide = [t.detach().double()[:7].requires_grad_() for t in given]
    gate, up = wide[0].chunk(2, 1)
    y_ = torch.nn.functional.silu(gate) * up
    (dh_,) = torch.autograd.grad(y_, wide[0], wide[1], create_graph=True)
    second_ = torch.autograd.grad(dh_, wide, bars.double()[:7])
    for found, want in ((y, y_), (dh, dh_)):
        off = (found.detach()[:7].double() - want.detach()).abs()
        assert bool((off <= 2.0**-8 * want.abs() + 1e-6).all())
    for found, want in zip(second, second_, strict=True):
        assert near(found[1:7], want[1:7], 2.0**-7)
