"""Kernels for mutants, continued: rows, norms and their gradients, quantization, mixtures.

The kernels of short norms, of rope, of map and of cross-entropy's gradient synchronise nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from call_subjects import Call, normal, subject
from subjects import Subject

import cutex
from cutex.kernels.quantize import config
from cutex.kernels.row import choose, choose_norm
from cutex.ops.mixture import routing
from cutex.ops.row import norm, rows

ARCH = "sm_90a"


@contextmanager
def _of_many_rows(like: str) -> Iterator[None]:
    """A context in which few rows run as many do: ``like`` "bulk", "dense" or "resident", and two
    clusters take all rows in turn.
    """

    def when(how: str) -> tuple[int]:
        return (0 if like == how else 1 << 40,)

    with (
        mock.patch.object(choose_norm.bulk, "__defaults__", when("bulk")),
        mock.patch.object(choose_norm.dense, "__defaults__", when("dense")),
        mock.patch.object(choose_norm.resident, "__defaults__", when("resident")),
        mock.patch.object(choose, "BULK_LEAST", *when("bulk")),
        mock.patch.object(choose.bulk_rows, "__defaults__", when("bulk")),
        mock.patch.object(rows, "LINE", 1),  # of a choice that the place of a tensor decides
        mock.patch.object(norm, "bulk_groups", lambda *_: 2),
        mock.patch.object(sys.modules["cutex.ops.row.softmax"], "bulk_groups", lambda *_: 2),
        mock.patch.object(norm, "most_clusters", lambda *_: 2),
    ):
        yield


def _norm(m: int, n: int, centred: bool = False, like: str = "", **options: str) -> Call:
    """A norm of rows."""
    x, w, b = normal(m, n), normal(n, seed=1), normal(n, seed=2)

    def call() -> Sequence[torch.Tensor]:
        with _of_many_rows(like):
            if centred:
                return (cutex.layer_norm(x, w, b),)
            out = cutex.rms_norm(x, w, **options)
        return (out,) if isinstance(out, torch.Tensor) else (out.data.float(), out.scale.float())

    return call


def _gradient(of: Callable[..., torch.Tensor], *inputs: torch.Tensor, like: str = "") -> Call:
    """The gradients of a function, of a forward pass that runs with each call."""

    def call() -> Sequence[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        with _of_many_rows(like):
            out = of(*leaves)
            dy = normal(*out.shape, seed=9).to(out.dtype)
            return torch.autograd.grad(out, leaves, dy)

    return call


def _layer_gradient(m: int, n: int) -> Call:
    """The gradient of a layer norm of dense rows, which come by bulk copies."""
    return _gradient(cutex.layer_norm, normal(m, n), *normal(2, n, seed=1).unbind(), like="bulk")


def _softmax(m: int, n: int) -> Call:
    def call() -> Sequence[torch.Tensor]:
        with _of_many_rows("bulk"):
            return (cutex.softmax(normal(m, n)),)

    return call


def _quantized(format: str, along: str = "rows") -> Call:
    def call() -> Sequence[torch.Tensor]:
        made = cutex.quantize(normal(300, 520), format, along=along)
        each = made if along == "both" else (made,)
        return [t.contiguous().view(torch.uint8).float() for q in each for t in (q.data, q.scale)]

    return call


def _quantized_by_two() -> Sequence[torch.Tensor]:
    """NVFP4 along both sides by two CTAs that stay, three tiles each."""
    with mock.patch.object(config, "STAYING", (2, 2)):
        made = cutex.quantize(normal(160, 320), "nvfp4", along="both", tensor_scale=torch.ones(1))
    return [t.view(torch.uint8).float() for q in made for t in (q.data, q.scale)]


def _mixture(gradient: bool = False) -> Call:
    """Six experts of which each token of 150 asks two."""
    x, up, down = normal(150, 64), normal(6, 64, 256, seed=1), normal(6, 128, 64, seed=2)
    weights = torch.rand(150, 2, generator=torch.Generator().manual_seed(3))
    ids = torch.randint(0, 6, (150, 2), generator=torch.Generator().manual_seed(4))

    def moe(x: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor):
        return cutex.moe(x, weights, ids, up, down)

    given = x, weights, up / 8, down / 8
    return _gradient(moe, *given) if gradient else lambda: (moe(*given),)


def _routes() -> Sequence[torch.Tensor]:
    """Two rounds of entries for each warp, more buckets than a warp has lanes."""
    ids = torch.randint(0, 40, (2600, 2), generator=torch.Generator().manual_seed(4))
    return [t.float() for t in routing.route(ids, 40)]


def _subjects() -> list[Subject]:
    few = torch.arange(700) % 77
    softmax, masked = cutex.softmax, lambda x: cutex.softmax(x, scale=0.5, causal=True)
    calls: dict[str, tuple[Call, int | str]] = {
        "layer_norm, staged": (_norm(6, 6144, centred=True), 0),
        "layer_norm, shared by four": (_norm(3, 65_536, centred=True), 0),
        "norm, dense rows": (_norm(300, 61, like="dense"), 0),
        "norm, by element": (_norm(40, 1203), 0),
        "norm, by bulk copies": (_norm(40, 1601, centred=True, like="bulk"), 0),
        "norm, by bulk copies, short": (_norm(300, 390, centred=True, like="bulk"), 0),
        "norm, by bulk copies, clusters": (_norm(20, 40_001, centred=True, like="bulk"), 0),
        "norm, by bulk copies, sixteen CTAs": (_norm(10, 140_001, centred=True, like="bulk"), 0),
        "norm, relayed vectors": (_norm(14, 40_000, centred=True, like="bulk"), 0),
        "norm, relayed by sixteen CTAs": (_norm(10, 140_000, centred=True, like="bulk"), 0),
        "norm, halves of words": (_norm(10, 188_793, centred=True, like="bulk"), 0),
        "norm, one CTA of vectors": (_norm(14, 20_000, centred=True, like="bulk"), 0),
        "norm, rows in turn": (_norm(14, 2048, centred=True, like="resident"), 0),
        "norm, rows in turn, clusters": (_norm(14, 16_384, centred=True, like="resident"), 0),
        "layer_norm's gradient, bulk": (_layer_gradient(14, 1601), "backward_bulk"),
        "layer_norm's gradient, parts": (_layer_gradient(14, 50_257), "backward_bulk"),
        "layer_norm's gradient, vectors": (_layer_gradient(14, 16_384), "backward_bulk"),
        "layer_norm's gradient, relayed": (_layer_gradient(10, 131_072), "backward_bulk"),
        "softmax, bulk": (_softmax(14, 11_003), 0),
        "softmax, bulk, parts": (_softmax(14, 40_001), 0),
        "rms_norm, fp8": (_norm(40, 2048, quantize="fp8"), 0),
        "rms_norm, mxfp8": (_norm(40, 2048, quantize="mxfp8"), 0),
        "rms_norm's gradient": (
            _gradient(cutex.rms_norm, normal(40, 1024), normal(1024, seed=1)), -1
        ),
        "rms_norm's gradient, long": (
            _gradient(cutex.rms_norm, normal(12, 20_000), normal(20_000, seed=1)), -1
        ),
        "layer_norm's gradient, odd": (
            _gradient(cutex.layer_norm, normal(12, 3077), *normal(2, 3077, seed=1).unbind()), -1
        ),
        "softmax, long": (lambda: (softmax(normal(3, 50_264)),), 0),
        "softmax, sixteen CTAs": (lambda: (softmax(normal(2, 200_000)),), 0),
        "softmax's gradient": (_gradient(softmax, normal(40, 5003)), -1),
        "softmax, causal": (lambda: (masked(normal(2, 40, 3000)),), 0),
        "softmax, causal, gradient": (_gradient(masked, normal(2, 40, 3000)), -1),
        "cross_entropy, many rows": (
            lambda: (cutex.cross_entropy(normal(700, 77), few),), 0
        ),
        "cross_entropy, very many rows": (
            lambda: (cutex.cross_entropy(normal(70_000, 8), torch.arange(70_000) % 8),), 0
        ),
        "reduce, parts": (lambda: (cutex.reduce(normal(6, 100_000), "sum", 1),), 0),
        "reduce, atomics": (
            lambda: (cutex.reduce(normal(6, 100_000), "sum", 1, deterministic=False),), 0
        ),
        "reduce, columns": (lambda: (cutex.reduce(normal(3000, 72), "max", 0),), 0),
        "reduce, columns, atomics": (
            lambda: (cutex.reduce(normal(3000, 72), "sum", 0, deterministic=False),), 0
        ),
        "argmax": (lambda: (cutex.reduce(normal(3, 100_000), "argmax", 1).float(),), 0),
        "scan, parts": (lambda: (cutex.scan(normal(1, 60_000)),), 0),
        "scan, short rows": (lambda: (cutex.scan(normal(40, 500)),), 0),
        "histogram, wide": (
            lambda: (cutex.histogram(normal(9000).float(), 3000, low=-2.0, high=2.0),), 0
        ),
        **{f"quantize {f}": (_quantized(f), -1) for f in ("mxfp8", "nvfp4", "fp8_1x128")},
        "quantize mxfp8, both": (_quantized("mxfp8", "both"), -1),
        "quantize nvfp4, by CTAs that stay": (_quantized_by_two, -1),
        "quantize fp8_128x128": (_quantized("fp8_128x128"), -1),
        "routes of a mixture": (_routes, 0),
        "mixture, spread": (_mixture(gradient=True), "spread"),
        "mixture, combined": (_mixture(), "combine"),
        "mixture, gates' gradient": (_mixture(gradient=True), "gate"),
    }  # fmt: skip
    return [subject(name, ARCH, call, which) for name, (call, which) in calls.items()]


ROWS = {s.name: s for s in _subjects()}
