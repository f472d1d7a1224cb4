"""Norms whose rows groups of CTAs share: right against float64; faults are found."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from row_calls import DTYPES, ORDERS, launched, near, rows

import cutex
from cutex.arch import arch
from cutex.compile import Compiled, compile
from cutex.device.pipeline import Barrier
from cutex.device.row import exchanged
from cutex.dtypes import of_torch
from cutex.kernels.row import choose_groups
from cutex.kernels.row.norm_by_groups import GroupsConfig, NormByGroups
from cutex.ops.row import norm
from cutex.ops.row.rows import arch_of
from cutex.sim import simulate
from cutex.sim.errors import SimError

SMEM = 227 << 10


def config_of(n, dtype, aligned, sharers, centred, ahead, stages=6, threads=512, **more):
    width = 16 // dtype.itemsize
    how = {"ahead": ahead, "stages": stages, "threads": threads}
    by = choose_groups.groups(n, width, aligned, sharers, SMEM, **how)
    return GroupsConfig(**by._asdict(), centred=centred, halves=False, **more)


def words(config, groups, device):
    count = exchanged.words_of(groups, config.sharers, 1 + config.centred, config.ahead)
    return torch.zeros(count, dtype=torch.int32, device=device)


def wanted(x, w, b, eps):
    """The norm in float64, its mean and rstd; without a bias that of an RMS norm."""
    mean = x.double().mean(-1, keepdim=True)
    apart = x.double() - (0 if b is None else mean)
    rstd = (apart.square().mean(-1, keepdim=True) + eps).rsqrt()
    return apart * rstd * w.double() + (0 if b is None else b.double()), mean[:, 0], rstd[:, 0]


@pytest.mark.sweep(36)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms norm", "layer norm"])
@pytest.mark.parametrize("n, sharers, groups", [(3000, 2, 2), (4096, 3, 4), (6151, 3, 2)])
@pytest.mark.parametrize("m, ahead", [(13, 2), (2, 1)])
def test_norms_of_rows_that_groups_share(device, n, sharers, groups, m, ahead, centred, dtype):
    # NaN around the rows' memory; fewer groups than rows; every third row is NaN
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies are from sm_90 on")
    aligned = n % 8 == 0
    x, y = (
        torch.full((m * n + 48,), torch.nan, dtype=dtype, device=device)[16:-32].view(m, n)
        for _ in range(2)
    )
    x.copy_(rows(device, (m, n), dtype))
    x[: m // 2, : n // 3] += 64  # the parts of a row, which meet, differ
    x[2::3] = torch.nan
    w, b = (rows(device, (n,), torch.bfloat16, seed=seed) for seed in (1, 2))
    mean, rstd = torch.full((2, m), torch.nan, device=device)
    how = {"weight": "bf16", "bias": "bf16" * centred, "saves": True}
    config = config_of(n, dtype, aligned, sharers, centred, ahead, **how)
    device_arch = "sm_90a" if device == "cpu" else arch_of(x.device, "a norm")
    kernel = compile(NormByGroups(config), of_torch(dtype).name, device_arch)
    optional = (w, b, mean, rstd) if centred else (w, rstd)
    kept = words(config, groups, device)
    for _ in range(2):
        launched(kernel, device, x, y, *optional, kept, 1e-5, groups)
        assert not kept.any()  # as the next launch wants it
    right = [i for i in range(m) if i % 3 != 2]
    norm, means, inverse = wanted(x, w, b if centred else None, 1e-5)
    near(y[right], norm[right], dtype, 8)
    near(rstd[right], inverse[right], torch.float32, 4)
    if centred:
        near(mean[right], means[right], torch.float32, 4)
    assert y[2::3].isnan().all()
    whole = y.as_strided((m * n + 48,), (1,), 0)
    assert whole[:16].isnan().all() and whole[-32:].isnan().all()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("centred", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize("n, dtype", [(13_001, torch.bfloat16), (6800, torch.float32)])
def test_functions_whose_rows_groups_share(
    device, asked, none_are_few, monkeypatch, centred, n, dtype
):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies are from sm_90 on")
    monkeypatch.setattr(norm, "sms_of", lambda *_: 4)
    monkeypatch.setattr(choose_groups, "BULK_LEAST", 0)
    kinds = [(c, w, a) for c in (True, False) for w in (4, 8) for a in (True, False)]
    monkeypatch.setattr(choose_groups, "FROM", dict.fromkeys(kinds, 0))
    x, (w, b) = rows(device, (5, n), dtype), rows(device, (2, n))
    x[:, : n // 3] += 64
    for _ in range(2):
        y = cutex.layer_norm(x, w, b, eps=1e-5) if centred else cutex.rms_norm(x, w, eps=1e-5)
        near(y, wanted(x, w, b if centred else None, 1e-5)[0], dtype, 8)
    assert {kind for kind, *_ in asked} == {NormByGroups}


def test_every_group_that_shares_rows_holds_them(monkeypatch):
    kinds = [(c, w, a) for c in (True, False) for w in (4, 8) for a in (True, False)]
    monkeypatch.setattr(choose_groups, "FROM", dict.fromkeys(kinds, 0))
    smem, found = arch("sm_90a").smem_per_cta, 0
    for n in range(5000, 600_000, 1237):
        for width, sms, m in ((8, 132, 401), (4, 132, 97), (8, 78, 3000), (8, 132, 2)):
            by = choose_groups.by_groups(m, n, width, n % width == 0, True, sms, "sm_90a")
            if by is None:
                continue
            found += 1
            count, per = (
                choose_groups.count_of(m, n, width, sms * by.resident, by.sharers),
                width // 4,
            )
            part = -(-n // (8 * by.sharers)) * 8
            assert 0 < by.sharers * count <= sms * by.resident and (count % 2 == 0 or n % per == 0)
            shortest = n - part * (by.sharers - 1)
            held = by.tile.threads * by.words * per
            assert 0 < shortest <= part <= held
            # of a thread's words, or vectors, those that may lie past the row's end are asked
            whole = by.words - (4 if by.vector else 1) * by.open
            assert by.tile.threads * whole * per <= shortest
            slot = choose_groups.slot_bytes(by.tile.threads * by.words * 4)
            assert by.stages * slot <= smem // by.resident - choose_groups.BULK_SPARE
            assert by.ahead + 1 + choose_groups.LOADING <= by.stages
    assert found > 500


FAULTS = {
    "one slot for all turns": (exchanged, "slots_of", lambda ahead: 1),
    "words are not zeroed": (exchanged.ExchangedReduction, "leave", lambda self: None),
    "one arrival is enough": (Barrier, "allocate", None),
}


def fails(kernel, order, seed) -> bool:
    """Whether two launches one after the other are wrong, or the simulator finds something."""
    n, kept = 6151, words(kernel.config, 2, "cpu")
    x, y = rows("cpu", (13, n), torch.bfloat16), torch.full((13, n), torch.nan).bfloat16()
    x[::3] += 200
    try:
        for _ in range(2):
            assert not simulate(
                kernel.compiled, x, y, kept, 1e-5, 2, order=order, seed=seed
            ).findings
            assert not kept.any()
            near(y, torch.nn.functional.layer_norm(x.double(), (n,), eps=1e-5), torch.bfloat16, 8)
    except (AssertionError, SimError):
        return True
    return False


class Made(NamedTuple):
    config: GroupsConfig
    compiled: Compiled


def made(ahead) -> Made:
    config = config_of(6151, torch.bfloat16, False, 3, True, ahead, threads=64, stages=ahead + 3)
    return Made(config, compile(NormByGroups(config), "bf16", "sm_90a", cache=False))


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("fifo", 0), *ORDERS, ("eager", 0)])
@pytest.mark.parametrize("ahead", [1, 2])
def test_groups_in_every_order_of_events(ahead, order, seed):
    assert not fails(made(ahead), order, seed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_fault_of_groups_is_found(ahead, fault, monkeypatch):
    if fault == "one arrival is enough":
        allocate = Barrier.allocate
        monkeypatch.setattr(
            Barrier, "allocate",
            lambda smem, event, count, slots=1: allocate(
                smem, event, 1 if event == "full" else count, slots
            ),
        )  # fmt: skip
    else:
        monkeypatch.setattr(*FAULTS[fault])
    kernel = made(ahead)
    assert any(fails(kernel, *how) for how in [("fifo", 0), *ORDERS])
