"""One text of a kernel of rows changed: relayed sums, vectors, halves of words, gradients, softmax.

Each is found in the default order, as a wrong result or by the simulator.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from row_calls import near, rows
from row_mutants import FAULTS

from cutex.compile import compile
from cutex.device.row.tile import RowTile
from cutex.kernels.row import (
    choose,
    cross_entropy_dense,
    norm_backward_bulk,
    norm_bulk,
    norm_by_tickets,
    norm_resident,
    softmax_bulk,
    softmax_by_tickets,
    softmax_dense,
)
from cutex.kernels.row import norm as norm_kernel
from cutex.kernels.row.cross_entropy_dense import DenseLossesConfig
from cutex.kernels.row.norm import NormConfig
from cutex.kernels.row.norm_backward_bulk import BackwardBulkConfig
from cutex.kernels.row.norm_bulk import BulkConfig
from cutex.kernels.row.norm_by_tickets import TicketsConfig
from cutex.kernels.row.norm_resident import ResidentConfig
from cutex.kernels.row.softmax_bulk import RowsBulkConfig
from cutex.kernels.row.softmax_by_tickets import RowsTicketsConfig
from cutex.kernels.row.softmax_dense import DenseRowsConfig
from cutex.sim import simulate
from cutex.sim.errors import SimError

M, EPS, GROUPS = 27, 1e-5, 2


def by_words(n: int, tile: RowTile, vectors: bool) -> dict[str, int]:
    """The words of a thread, by vectors or anywhere."""
    found = choose.vectors_of(n, tile) if vectors else (choose.words_of(n, tile),)
    return dict(zip(("words", "vector", "open"), found, strict=False))


def inputs(n: int, *seeds: int) -> list[torch.Tensor]:
    """bf16 rows (M, n), of which some, and the parts of some, are far from 0."""
    made = [rows("cpu", (M, n), torch.bfloat16, seed=seed) for seed in seeds]
    made[0][::3] += 50
    made[0][1, : n // 3] += 64
    return made


def norm(tile: RowTile, n: int, ahead: int = 0, vectors: bool = False, halves: bool = False):
    """A layer norm by bulk copies."""
    config = BulkConfig(
        tile, True, weight="bf16", bias="bf16", stages=2 + ahead, ahead=ahead, halves=halves,
        **by_words(n, tile, vectors),
    )  # fmt: skip

    def run() -> None:
        kernel = compile(norm_bulk.NormBulk(config), "bf16", "sm_90a", cache=False)
        (x,), (w, b) = inputs(n, 0), rows("cpu", (2, n), torch.bfloat16, seed=1)
        y = torch.full_like(x, torch.nan)
        groups = GROUPS + halves  # so that one has rows of both halves
        assert not simulate(kernel, x, y, w, b, EPS, groups).findings
        near(y, F.layer_norm(x.double(), (n,), w.double(), b.double(), EPS), torch.bfloat16, 8)

    return run


def by_tickets(
    tile: RowTile, n: int, ahead: int = 0, vectors: bool = False, each: int = 1
) -> Callable[[], None]:
    """A layer norm by bulk copies whose CTAs draw tickets, twice: the first leaves the count."""
    config = TicketsConfig(
        tile, True, weight="bf16", bias="bf16", stages=2 + ahead, ahead=ahead,
        each=each, **by_words(n, tile, vectors),
    )  # fmt: skip

    def run() -> None:
        kernel = compile(norm_by_tickets.NormByTickets(config), "bf16", "sm_90a", cache=False)
        (x,), (w, b) = inputs(n, 0), rows("cpu", (2, n), torch.bfloat16, seed=1)
        want = F.layer_norm(x.double(), (n,), w.double(), b.double(), EPS)
        drawn = torch.zeros(2, dtype=torch.int32)
        for _ in range(2):
            y = torch.full_like(x, torch.nan)
            assert not simulate(kernel, x, y, w, b, drawn, EPS, GROUPS).findings
            near(y, want, torch.bfloat16, 8)

    return run


def resident(tile: RowTile, n: int) -> Callable[[], None]:
    """A layer norm of aligned rows in turn."""
    config = ResidentConfig(tile, True, weight="bf16", bias="bf16")

    def run() -> None:
        kernel = compile(norm_resident.NormResident(config), "bf16", "sm_90a", cache=False)
        (x,), (w, b) = inputs(n, 0), rows("cpu", (2, n), torch.bfloat16, seed=1)
        y = torch.full_like(x, torch.nan)
        assert not simulate(kernel, x, y, w, b, EPS, GROUPS).findings
        near(y, F.layer_norm(x.double(), (n,), w.double(), b.double(), EPS), torch.bfloat16, 8)

    return run


def gradient(tile: RowTile, n: int, vectors: bool = False, relays: bool = False):
    """The gradient of a layer norm by bulk copies."""
    config = BackwardBulkConfig(
        tile, True, weight="bf16", bias="bf16", slots=2 + relays, relays=relays,
        **by_words(n, tile, vectors),
    )  # fmt: skip

    def run() -> None:
        kernel = compile(norm_backward_bulk.NormBackwardBulk(config), "bf16", "sm_90a", cache=False)
        (x, dy), w = inputs(n, 0, 1), rows("cpu", (n,), torch.bfloat16, seed=2)
        wide = x.double()
        mean = wide.mean(-1, keepdim=True)
        rstd = ((wide - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
        xhat, g = (wide - mean) * rstd, dy.double() * w.double()
        apart = xhat * (g * xhat).mean(-1, keepdim=True) + g.mean(-1, keepdim=True)
        made = {name: torch.full((n,), torch.nan).bfloat16() for name in config.sums}
        made |= {f"{name}_parts": torch.full((GROUPS, n), torch.nan) for name in config.sums}
        given = {"weight": w, "mean": mean[:, 0].float(), **made}
        optional = [given[name] for name in config.optional]
        dx, saved = torch.full_like(x, torch.nan), rstd[:, 0].float()
        assert not simulate(kernel, x, dy, dx, saved, *optional, GROUPS).findings
        near(dx, (g - apart) * rstd, torch.bfloat16, 16)
        near(made["dweight"], (dy.double() * xhat).sum(0), torch.bfloat16, M)
        near(made["dbias"], dy.double().sum(0), torch.bfloat16, M)

    return run


def softmax_of(tile: RowTile, n: int) -> Callable[[], None]:
    config = RowsBulkConfig(tile, choose.words_of(n, tile), 3, 1)

    def run() -> None:
        kernel = compile(softmax_bulk.SoftmaxBulk(config), "bf16", "sm_90a", cache=False)
        (x,) = inputs(n, 0)
        x[0] -= 3000
        y = torch.full_like(x, torch.nan)
        assert not simulate(kernel, x, y, GROUPS).findings
        near(y, x.double().softmax(-1), torch.bfloat16, 2**-6)

    return run


def softmax_by(tile: RowTile, n: int) -> Callable[[], None]:
    """Softmax by tickets, twice."""
    config = RowsTicketsConfig(tile, choose.words_of(n, tile), 3, 1)

    def run() -> None:
        kernel = compile(softmax_by_tickets.SoftmaxByTickets(config), "bf16", "sm_90a", cache=False)
        (x,), drawn = inputs(n, 0), torch.zeros(2, dtype=torch.int32)
        x[0] -= 3000
        for _ in range(2):
            y = torch.full_like(x, torch.nan)
            assert not simulate(kernel, x, y, drawn, GROUPS).findings
            near(y, x.double().softmax(-1), torch.bfloat16, 2**-6)

    return run


def few(tile: RowTile, n: int) -> Callable[[], None]:
    """A layer norm of few rows."""
    config = NormConfig(tile, True, weight="bf16", bias="bf16", few=True)

    def run() -> None:
        kernel = compile(norm_kernel.Norm(config), "bf16", "sm_90a", cache=False)
        (x,), (w, b) = inputs(n, 0), rows("cpu", (2, n), torch.bfloat16, seed=1)
        y = torch.full_like(x, torch.nan)
        assert not simulate(kernel, x, y, w, b, EPS).findings
        near(y, F.layer_norm(x.double(), (n,), w.double(), b.double(), EPS), torch.bfloat16, 8)

    return run


def dense_losses(tile: RowTile, n: int) -> Callable[[], None]:
    """Losses of dense rows; of some the logits are far from 0, or the largest numbers."""
    config = DenseLossesConfig(tile, target="int64", words=choose.words_of(n, tile))

    def run() -> None:
        kernel = compile(
            cross_entropy_dense.CrossEntropyDense(config), "bf16", "sm_90a", cache=False
        )
        (x,), target = inputs(n, 0), torch.arange(M) % n
        x[5], x[6, ::2], x[6, 1::2] = x[5] + 3000, 3e38, 1e38
        x[7] = 3e38
        x[8, 1::2] += 200  # beside which another reference than the largest overflows
        x[9, n // 2 :] += 200
        lse, losses = torch.full((2, M), torch.nan)
        assert not simulate(kernel, x, target, lse, losses, 0.0, 0.0, -100).findings
        near(losses, F.cross_entropy(x.double(), target, reduction="none"), torch.float32, 8)

    return run


def dense_softmax(tile: RowTile, n: int) -> Callable[[], None]:
    config = DenseRowsConfig(tile, choose.words_of(n, tile))

    def run() -> None:
        kernel = compile(softmax_dense.SoftmaxDense(config), "bf16", "sm_90a", cache=False)
        (x,) = inputs(n, 0)
        y = torch.full_like(x, torch.nan)
        assert not simulate(kernel, x, y).findings
        near(y, x.double().softmax(-1), torch.bfloat16, 2**-6)

    return run


def of_a_run(rows: int, threads: int, n: int) -> tuple[RowTile, int]:
    """The tile of so many dense rows of a CTA, and their columns."""
    return RowTile(rows, threads, 1, -(-(rows * n + 7) // (rows * threads * 8)), 8, False), n


ONE, TWO, FOUR = (RowTile(1, 64, ctas, 1, 8, False) for ctas in (1, 2, 4))
CASES: dict[str, Callable[[], None]] = {
    "relayed": norm(TWO, 787, ahead=2),
    "relayed, a turn ahead": norm(FOUR, 1001, ahead=1),
    "relayed, vectors": norm(FOUR, 3960, ahead=1, vectors=True),
    "halves": norm(TWO, 787, ahead=2, halves=True),
    "vectors": norm(ONE, 744, vectors=True),
    "tickets": by_tickets(ONE, 744, vectors=True),
    "tickets, odd": by_tickets(ONE, 777),
    "tickets, several turns": by_tickets(ONE, 744, vectors=True, each=2),
    "tickets, clusters": by_tickets(FOUR, 3960, ahead=1, vectors=True),
    "resident": resident(RowTile(1, 64, 2, 2, 8), 1800),
    "gradient": gradient(TWO, 787),
    "gradient, vectors": gradient(FOUR, 3960, vectors=True),
    "gradient, relayed": gradient(FOUR, 3960, vectors=True, relays=True),
    "softmax": softmax_of(TWO, 787),
    "softmax, tickets": softmax_by(ONE, 787),
    "softmax, tickets, clusters": softmax_by(FOUR, 787),
    "losses, dense": dense_losses(*of_a_run(4, 16, 77)),
    "softmax, dense": dense_softmax(*of_a_run(4, 32, 301)),
    "few": few(RowTile(1, 64, 4, 4, 1), 787),
}


def change(module: ModuleType, text: str, into: str, where: Path, monkeypatch: Any) -> None:
    """Put what a module with one text changed defines in the place of the module's own."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(text) >= 1, f"{module.__name__} has no {text!r}"
    path = where / f"changed_{module.__name__.rpartition('.')[-1]}.py"
    path.write_text(source.replace(text, into))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, changed)
    spec.loader.exec_module(changed)
    own = {
        id(v): k for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
    }
    for value in [v for v in vars(module).values() if id(v) in own and isinstance(v, type)]:
        if any(kind.__module__ != path.stem for kind in value.__subclasses__()):
            # those inherit from the module's own class: its methods are changed in place
            for name, method in vars(getattr(changed, own[id(value)])).items():
                code = getattr(inspect.unwrap(method), "__code__", None)
                if code is not None and "__class__" not in code.co_freevars:
                    monkeypatch.setattr(value, name, method)
    for other in [m for name, m in sys.modules.items() if name.startswith(("cutex.", __name__))]:
        for name, value in list(vars(other).items()):
            if id(value) in own:
                monkeypatch.setattr(other, name, getattr(changed, own[id(value)]))


def wrong(case: str) -> str | None:
    """What is wrong with a case; None if nothing is."""
    try:
        CASES[case]()
    except (AssertionError, SimError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_without_a_change_nothing_is_wrong(case):
    assert wrong(case) is None


@pytest.mark.slow
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_found(what, tmp_path, monkeypatch):
    fault = FAULTS[what]
    change(fault.module, fault.text, fault.into, tmp_path, monkeypatch)
    assert wrong(fault.case) is not None
