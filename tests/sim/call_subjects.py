"""Kernels for mutants that public functions launch: attention's backward, caches and MLA, grouped,
scaled and 4-bit products, unaligned operands, mma.sync, rows. Inputs are so large that rings wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from subjects import Subject

import cutex
from cutex.ops.device import forget_plans
from cutex.simulation import SimulatedDevice, simulating

Call = Callable[[], Sequence[torch.Tensor]]  # of a public function; returns what it has computed


def _here(arch: str, launch: Callable[[Any, tuple[Any, ...]], None], call: Call) -> Any:
    """What ``call`` computes where ``launch`` runs each kernel."""
    with simulating(SimulatedDevice(arch, launch)):
        forget_plans()
        try:
            return call()
        finally:
            forget_plans()


def _far_off(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> str | None:
    """What differs by more than 2 % of the largest value: sums may come in another order."""
    for number, (x, y) in enumerate(zip(got, want, strict=True)):
        x, y = x.double(), y.double()
        if not (x.isfinite() == y.isfinite()).all():
            return f"output {number} is not finite where it should be"
        largest, off = (float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in (y, x - y))
        if off > 0.02 * largest:
            return f"output {number} is off by {off:.3g} of {largest:.3g}"
    return None


def _subject(name: str, arch: str, call: Call, which: int = 0) -> Subject:
    """The ``which``-th of the kernels that ``call`` launches."""

    def build() -> Any:
        found: dict[str, Any] = {}
        _here(arch, lambda compiled, _: found.setdefault(compiled.symbol, compiled), call)
        return list(found.values())[which]

    @cache
    def want() -> Sequence[torch.Tensor]:
        return _here(arch, _unchecked, call)

    def launch(run: Callable[..., None], kernel: Any) -> str | None:
        def each(compiled: Any, given: tuple[Any, ...]) -> None:
            if compiled.symbol == kernel.symbol:
                run(*given)
            else:
                _unchecked(compiled, given)

        return _far_off(_here(arch, each, call), want())

    return Subject(f"{name} {arch}", build, launch)


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _unchecked(compiled: Any, given: tuple[Any, ...]) -> None:
    cutex.simulate(compiled, *given, checks=False)


def _backward(arch: str, head_dim: int, seqlen: int, **options: Any) -> Call:
    """Attention's backward, of a forward that runs once."""

    @cache
    def forward() -> Sequence[torch.Tensor]:
        qkv = [_normal(1, seqlen, 1, head_dim, seed=i).requires_grad_() for i in range(3)]
        return _here(arch, _unchecked, lambda: (cutex.flash_attn_func(*qkv, **options), *qkv))

    def call() -> Sequence[torch.Tensor]:
        out, *qkv = forward()
        return torch.autograd.grad(out, qkv, _normal(*out.shape, seed=3), retain_graph=True)

    return call


def _cached(case: dict[str, Any], layout: dict[str, Any]) -> Call:
    """Attention to a cache, by one to three launches."""
    heads, tokens, lengths = case["heads"], case["tokens"], case["lengths"]

    def call() -> Sequence[torch.Tensor]:
        q = _normal(len(lengths), tokens, heads, 64)
        k, v = (_normal(len(lengths), max(lengths), 1, 64, seed=i) for i in (1, 2))
        used = torch.tensor(lengths, dtype=torch.int32)
        out = cutex.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, **layout)
        return (out,)

    return call


def _mla(lengths: tuple[int, ...]) -> Call:
    def call() -> Sequence[torch.Tensor]:
        counts = torch.tensor(lengths, dtype=torch.int32)
        pages = [-(-n // 64) for n in lengths]
        table = torch.arange(len(lengths) * max(pages), dtype=torch.int32).view(len(lengths), -1)
        q = _normal(len(lengths), 1, 128, 576)
        rows = _normal(table.numel(), 64, 1, 576, seed=1)
        plan = cutex.get_mla_metadata(counts, 128, 1)
        return cutex.flash_mla_with_kvcache(q, rows, table, counts, 512, *plan)

    return call


def _grouped(sums: bool) -> Call:
    def call() -> Sequence[torch.Tensor]:
        if sums:  # a tile of a group of K = 900 wraps the ring
            offs = torch.tensor([130, 130, 1030, 1150], dtype=torch.int32)
            x = _normal(1150, 600)
            return (cutex.grouped_mm(x.mT, _normal(1150, 264, seed=1), offs),)
        offs = torch.tensor([130, 130, 400, 520], dtype=torch.int32)
        x = _normal(520, 600)
        return (cutex.grouped_mm(x, _normal(4, 264, 600, seed=1).mT, offs),)

    return call


def _quantized(m: int, n: int, k: int, of_a: str, of_b: str) -> Call:
    def call() -> Sequence[torch.Tensor]:
        a, b = cutex.quantize(_normal(m, k), of_a), cutex.quantize(_normal(n, k, seed=1), of_b)
        return (cutex.scaled_mm(a, b),)

    return call


def _w4() -> Sequence[torch.Tensor]:
    packed = cutex.pack_w4(_normal(264, 6144, seed=1))
    return (cutex.matmul(_normal(40, 6144), packed),)


def _product(a: torch.Tensor, b: torch.Tensor) -> Call:
    return lambda: (cutex.matmul(a, b),)


def _subjects() -> list[Subject]:
    one = {"heads": 8, "tokens": 1, "lengths": (400, 65)}
    many = {"heads": 16, "tokens": 4, "lengths": (400, 65)}
    found = []
    for arch in ("sm_90a", "sm_100a"):
        for dim in (64, 128):
            call = _backward(arch, dim, 200, causal=True)
            found.append(_subject(f"backward {dim}", arch, call))
        found += [
            _subject("backward 128, full", arch, _backward(arch, 128, 200)),
            _subject("decode, parts", arch, _cached(one, {"num_splits": 3})),
            _subject("decode, rows", arch, _cached(many, {})),
            _subject("MLA", arch, _mla((400, 70))),
            _subject("grouped", arch, _grouped(False)),
            _subject("grouped sums", arch, _grouped(True)),
            _subject("w4", arch, _w4),
        ]
    found += [
        _subject(
            "fp8 blocks", "sm_90a", _quantized(300, 264, 1024, "fp8_1x128", "fp8_128x128"), -1
        ),
        _subject(
            "fp8 few rows", "sm_90a", _quantized(64, 264, 6144, "fp8_1x128", "fp8_128x128"), -1
        ),
        _subject("mxfp8", "sm_100a", _quantized(300, 264, 1024, "mxfp8", "mxfp8"), -1),
        _subject("nvfp4", "sm_100a", _quantized(300, 264, 2048, "nvfp4", "nvfp4"), -1),
        _subject(
            "unaligned", "sm_90a", _product(_normal(1600, 201).mT, _normal(1600, 136, seed=1))
        ),
        _subject("few rows", "sm_90a", _product(_normal(1600, 5).mT, _normal(1600, 40, seed=1))),
        _subject("mma.sync", "sm_80", _product(_normal(100, 264), _normal(264, 136, seed=1))),
        _subject(
            "rms_norm, long",
            "sm_90a",
            lambda: (cutex.rms_norm(_normal(3, 40_000), _normal(40_000, seed=1)),),
        ),
        _subject("softmax", "sm_90a", lambda: (cutex.softmax(_normal(40, 1023)),)),
        _subject(
            "cross_entropy",
            "sm_90a",
            lambda: (cutex.cross_entropy(_normal(5, 50_264), torch.arange(5)),),
        ),
        _subject("reduce", "sm_90a", lambda: (cutex.reduce(_normal(300_000)),)),
        _subject("scan", "sm_90a", lambda: (cutex.scan(_normal(3, 20_000)),)),
        _subject(
            "histogram",
            "sm_90a",
            lambda: (cutex.histogram(_normal(2000).float(), 77, low=-2.0, high=2.0),),
        ),
    ]
    return found


CALLS = {s.name: s for s in _subjects()}
