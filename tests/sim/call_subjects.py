"""Kernels for mutants that public functions launch: attention's backward, caches and MLA, grouped,
scaled and 4-bit products, unaligned operands, mma.sync, rows. Inputs are so large that rings wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
from subjects import Subject

import cutex
from cutex.arch import KNOWN
from cutex.ops.device import forget_plans
from cutex.ops.workspace import forget_flags
from cutex.simulation import SimulatedDevice, simulating

FEW = 4  # SMs, so that each CTA of a persistent grid has several tiles
Call = Callable[[], Sequence[torch.Tensor]]  # of a public function; returns what it has computed


def _here(
    arch: str, launch: Callable[[Any, tuple[Any, ...]], None], call: Call, sms: int = 0
) -> Any:
    """What ``call`` computes where ``launch`` runs each kernel; on a GPU of so many SMs, if any."""
    facts = {arch: replace(KNOWN[arch], num_sms=sms or KNOWN[arch].num_sms)}
    with mock.patch.dict(KNOWN, facts), simulating(SimulatedDevice(arch, launch)):
        forget_plans()
        try:
            return call()
        finally:
            forget_plans()
            forget_flags(torch.device("cpu"))  # a mutant may have left some that are not zero


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


def subject(name: str, arch: str, call: Call, which: int | str = 0, sms: int = 0) -> Subject:
    """The ``which``-th of the kernels that ``call`` launches, or that whose name contains it."""

    def build() -> Any:
        found: dict[str, Any] = {}

        def launch(compiled: Any, given: tuple[Any, ...]) -> None:
            found.setdefault(compiled.symbol, compiled)
            if isinstance(which, str):  # what follows may depend on what this one computes
                _unchecked(compiled, given)

        _here(arch, launch, call, sms)
        if isinstance(which, int):
            return list(found.values())[which]
        return next(compiled for symbol, compiled in found.items() if which in symbol)

    @cache
    def want() -> Sequence[torch.Tensor]:
        return _here(arch, _unchecked, call, sms)

    def launch(run: Callable[..., None], kernel: Any) -> str | None:
        def each(compiled: Any, given: tuple[Any, ...]) -> None:
            if compiled.symbol == kernel.symbol:
                run(*given)
            else:
                _unchecked(compiled, given)

        return _far_off(_here(arch, each, call, sms), want())

    return Subject(f"{name} {arch}", build, launch)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _unchecked(compiled: Any, given: tuple[Any, ...]) -> None:
    cutex.simulate(compiled, *given, checks=False)


def _backward(arch: str, head_dim: int, seqlen: int, heads: int = 1, **options: Any) -> Call:
    """Attention's backward, of a forward that runs once."""

    @cache
    def forward() -> Sequence[torch.Tensor]:
        qkv = [normal(1, seqlen, heads, head_dim, seed=i).requires_grad_() for i in range(3)]
        return _here(arch, _unchecked, lambda: (cutex.flash_attn_func(*qkv, **options), *qkv))

    def call() -> Sequence[torch.Tensor]:
        out, *qkv = forward()
        return torch.autograd.grad(out, qkv, normal(*out.shape, seed=3), retain_graph=True)

    return call


def _cached(case: dict[str, Any], layout: dict[str, Any]) -> Call:
    """Attention to a cache, by one to three launches."""
    heads, tokens, lengths = case["heads"], case["tokens"], case["lengths"]
    page_size, head_dim = case.get("page_size"), case.get("head_dim", 64)
    dtype = case.get("dtype", torch.bfloat16)

    def call() -> Sequence[torch.Tensor]:
        q = normal(len(lengths), tokens, heads, head_dim).to(dtype)
        shape = len(lengths), max(lengths) + tokens
        given = dict(layout)
        if page_size is not None:
            each = -(-shape[1] // page_size)
            shape = len(lengths) * each, page_size
            table = torch.randperm(shape[0], generator=torch.Generator().manual_seed(3))
            given["page_table"] = table.int().view(len(lengths), each)
        k, v = (normal(*shape, 1, head_dim, seed=i).to(dtype) for i in (1, 2))
        if case.get("appended"):
            new = (normal(len(lengths), tokens, 1, head_dim, seed=i).to(dtype) for i in (4, 5))
            given.update(zip(("k", "v"), new, strict=True))
        used = torch.tensor(lengths, dtype=torch.int32)
        out = cutex.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, **given)
        return out, k.float(), v.float()

    return call


def _mla(lengths: tuple[int, ...]) -> Call:
    def call() -> Sequence[torch.Tensor]:
        counts = torch.tensor(lengths, dtype=torch.int32)
        pages = [-(-n // 64) for n in lengths]
        table = torch.arange(len(lengths) * max(pages), dtype=torch.int32).view(len(lengths), -1)
        q = normal(len(lengths), 1, 128, 576)
        rows = normal(table.numel(), 64, 1, 576, seed=1)
        plan = cutex.get_mla_metadata(counts, 128, 1)
        return cutex.flash_mla_with_kvcache(q, rows, table, counts, 512, *plan)

    return call


def _chosen() -> Sequence[torch.Tensor]:
    """MLA of 420 chosen keys, of which some are none."""
    chosen = torch.randint(-9, 448, (2, 1, 420), generator=torch.Generator().manual_seed(0))
    q, cache = normal(2, 1, 128, 576), normal(7, 64, 1, 576, seed=1)
    return cutex.flash_mla_with_kvcache(q, cache, None, None, 512, indices=chosen.int())


def _grouped(sums: bool) -> Call:
    def call() -> Sequence[torch.Tensor]:
        if sums:  # a tile of a group of K = 900 wraps the ring
            offs = torch.tensor([130, 130, 1030, 1150], dtype=torch.int32)
            x = normal(1150, 600)
            return (cutex.grouped_mm(x.mT, normal(1150, 264, seed=1), offs),)
        offs = torch.tensor([130, 130, 400, 510], dtype=torch.int32)
        x = normal(512, 600)  # in the mean whole tiles, as of even groups
        return (cutex.grouped_mm(x, normal(4, 264, 600, seed=1).mT, offs),)

    return call


def _long_groups() -> Sequence[torch.Tensor]:
    """Groups as those of 1024 rows and more: tiles of 208 columns, of two warpgroups in turn."""
    from cutex.kernels.gemm.grouped import choose

    few = {"LONG_GROUPS": 1, "VERY_LONG_GROUPS": 1, "MANY_ROWS": 1, "VERY_FEW_ROWS": 0}
    offs = torch.tensor([130, 130, 400, 510], dtype=torch.int32)
    with mock.patch.multiple(choose, SHORT_K=0, **few):
        return (cutex.grouped_mm(normal(512, 600), normal(4, 264, 600, seed=1).mT, offs),)


def _indexed(scattered: bool, **options: Any) -> Call:
    """Products of groups of rows that an index names, whose results go where another does."""

    def call() -> Sequence[torch.Tensor]:
        offs = torch.tensor([130, 130, 400, 520], dtype=torch.int32)
        x, w = normal(300, 640), normal(4, 264, 640, seed=1).mT
        g = torch.Generator().manual_seed(2)
        index = torch.randint(0, 300, (520,), generator=g, dtype=torch.int32)
        if not scattered:
            return (cutex.grouped_mm(x, w, offs, index=index, **options),)
        out = torch.zeros(600, 264, dtype=torch.bfloat16)
        to = torch.randperm(600, generator=g)[:520].int()
        if options.get("add"):
            to = to // 2
        return (cutex.grouped_mm(x, w, offs, index=index, out=out, out_index=to, **options),)

    return call


def _grouped_blocks(of_x: str, of_w: str) -> Call:
    """Groups of rows with factors of blocks."""

    def call() -> Sequence[torch.Tensor]:
        offs = torch.tensor([130, 130, 400, 520], dtype=torch.int32)
        plain = {"swizzled": False} if of_x.startswith(("mx", "nv")) else {}
        a = cutex.quantize(normal(520, 640), of_x, **plain)
        b = cutex.quantize(normal(4, 256, 640, seed=1), of_w)
        return (cutex.scaled_grouped_mm(a, b, offs=offs),)

    return call


def _with_pairs(call: Call) -> Call:
    """Blackwell's backward by pairs that exchange dS, which nothing chooses."""
    from cutex.kernels.attention.backward.sm100.pairs.config import pairs_of
    from cutex.ops.attention import own_backward

    fitted = own_backward.fitted

    def by_pairs() -> Sequence[torch.Tensor]:
        with mock.patch.object(own_backward, "fitted", lambda *given: pairs_of(fitted(*given))):
            return call()

    return by_pairs


def _quantized(m: int, n: int, k: int, of_a: str, of_b: str) -> Call:
    def call() -> Sequence[torch.Tensor]:
        a, b = cutex.quantize(normal(m, k), of_a), cutex.quantize(normal(n, k, seed=1), of_b)
        return (cutex.scaled_mm(a, b),)

    return call


def _w4(rows: int, kind: str = "int4", k: int = 6144) -> Call:
    def call() -> Sequence[torch.Tensor]:
        packed = cutex.pack_w4(normal(264, k, seed=1), kind=kind)
        return (cutex.matmul(normal(rows, k), packed),)

    return call


def _product(a: torch.Tensor, b: torch.Tensor) -> Call:
    return lambda: (cutex.matmul(a, b),)


def _subjects() -> list[Subject]:
    one = {"heads": 8, "tokens": 1, "lengths": (400, 65)}
    many = {"heads": 16, "tokens": 4, "lengths": (400, 65)}
    two = {"heads": 8, "tokens": 4, "lengths": (2400, 65)}  # groups of 16 rows
    told = {**many, "lengths": (200, 65, 10, 130, 90, 64, 1, 128, 70)}  # parts, to other roles
    found = []
    for arch in ("sm_90a", "sm_100a"):
        for dim in (64, 128):
            call = _backward(arch, dim, 200, causal=True)
            found.append(subject(f"backward {dim}", arch, call))
        found += [
            subject("backward 128, full", arch, _backward(arch, 128, 200)),
            subject("decode, parts", arch, _cached(one, {"num_splits": 3}), sms=FEW),
            subject("decode, rows", arch, _cached(many, {}), sms=FEW),
            subject("MLA", arch, _mla((400, 70)), sms=FEW),
            subject("grouped", arch, _grouped(False), sms=FEW),
            subject("grouped sums", arch, _grouped(True), sms=FEW),
            subject("w4", arch, _w4(40)),
            subject("backward 128, tiles in turn", arch, _backward(arch, 128, 200, 4)),
            subject("backward 256", arch, _backward(arch, 256, 200)),
            subject("backward, in order", arch, _backward(arch, 64, 330, deterministic=True)),
            subject("decode, pages", arch, _cached({**many, "page_size": 16}, {}), sms=FEW),
            subject("decode, appended", arch, _cached({**many, "appended": True}, {}), sms=FEW),
            subject("decode 128, one row", arch, _cached({**one, "head_dim": 128}, {}), sms=FEW),
            subject("w4, one row", arch, _w4(1)),
            subject("w4, mxfp4", arch, _w4(130, "mxfp4")),
            subject("grouped, gathered", arch, _indexed(False), sms=FEW),
            subject("grouped, scattered", arch, _indexed(True), sms=FEW),
            subject("grouped, added", arch, _indexed(True, add=True), sms=FEW),
        ]
    e4m3 = {"dtype": torch.float8_e4m3fn}
    found += [
        subject("w4, rings of warps", "sm_90a", _w4(3, "uint4", 6656)),
        subject("w4, two CTAs of an SM", "sm_90a", _w4(64, k=3584), sms=FEW),
        subject("grouped, 208 columns", "sm_90a", _long_groups, sms=FEW),
        subject("w4, blocks in turn", "sm_90a", _w4(16, "mxfp4", 6144)),
        subject("backward of pairs", "sm_100a", _with_pairs(_backward("sm_100a", 128, 300))),
        subject("decode, e4m3", "sm_90a", _cached({**many, **e4m3}, {}), sms=FEW),
        subject("decode, e4m3, one row", "sm_90a", _cached({**one, **e4m3}, {}), sms=FEW),
        subject("decode, e4m3, 32 rows", "sm_90a", _cached({**two, **e4m3}, {}), sms=FEW),
        subject("decode, e4m3, told parts", "sm_90a", _cached({**told, **e4m3}, {}), sms=FEW),
        subject(
            "decode, e4m3, whole",
            "sm_90a",
            _cached({**one, **e4m3, "lengths": (400, 65, 9, 70, 130)}, {}),
            sms=FEW,
        ),
        subject(
            "decode 256, told parts", "sm_90a", _cached({**told, "head_dim": 256}, {}), sms=FEW
        ),
        subject("decode, one row, appended", "sm_90a", _cached({**one, "appended": True}, {})),
        subject("MLA, chosen keys", "sm_90a", _chosen, sms=FEW),
        subject(
            "grouped fp8 blocks",
            "sm_90a",
            _grouped_blocks("fp8_1x128", "fp8_128x128"),
            "grouped",
            sms=FEW,
        ),
        subject("grouped mxfp8", "sm_100a", _grouped_blocks("mxfp8", "mxfp8"), "grouped", sms=FEW),
        subject("grouped nvfp4", "sm_100a", _grouped_blocks("nvfp4", "nvfp4"), "grouped", sms=FEW),
        subject("mxfp4", "sm_100a", _quantized(300, 264, 2048, "mxfp8", "mxfp4"), -1),
        subject(
            "fp32",
            "sm_90a",
            _product(normal(200, 520).float(), normal(520, 136, seed=1).float()),
        ),
    ]
    found += [
        subject("fp8 blocks", "sm_90a", _quantized(300, 264, 1024, "fp8_1x128", "fp8_128x128"), -1),
        subject(
            "fp8 few rows", "sm_90a", _quantized(64, 264, 6144, "fp8_1x128", "fp8_128x128"), -1
        ),
        subject("mxfp8", "sm_100a", _quantized(300, 264, 1024, "mxfp8", "mxfp8"), -1),
        subject("nvfp4", "sm_100a", _quantized(300, 264, 2048, "nvfp4", "nvfp4"), -1),
        subject("unaligned", "sm_90a", _product(normal(1600, 201).mT, normal(1600, 136, seed=1))),
        subject("few rows", "sm_90a", _product(normal(1600, 5).mT, normal(1600, 40, seed=1))),
        subject("mma.sync", "sm_80", _product(normal(100, 264), normal(264, 136, seed=1))),
        subject(
            "rms_norm, long",
            "sm_90a",
            lambda: (cutex.rms_norm(normal(3, 40_000), normal(40_000, seed=1)),),
        ),
        subject("softmax", "sm_90a", lambda: (cutex.softmax(normal(40, 1023)),)),
        subject(
            "cross_entropy",
            "sm_90a",
            lambda: (cutex.cross_entropy(normal(5, 50_264), torch.arange(5)),),
        ),
        subject("reduce", "sm_90a", lambda: (cutex.reduce(normal(300_000)),)),
        subject("scan", "sm_90a", lambda: (cutex.scan(normal(3, 20_000)),)),
        subject(
            "histogram",
            "sm_90a",
            lambda: (cutex.histogram(normal(2000).float(), 77, low=-2.0, high=2.0),),
        ),
    ]
    return found


CALLS = {s.name: s for s in _subjects()}
