"""flash_attn_with_kvcache, called with the arguments of an attention case, its keys in a cache."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import cutex
from cutex.problem.attention.case import AttentionCase, Inputs

# of a small case
SMALL = {"batch": 3, "heads_q": 4, "heads_kv": 2, "head_dim": 64, "head_dim_v": 64,
         "seqlen_q": 1, "seqlen_k": 200, "used_k": (200, 0, 65)}  # fmt: skip


def poisoned(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, torch.nan, device=like.device).to(like.dtype)


def in_pages(x: Tensor, table: Tensor, page_size: int, pages: int, used: tuple[int, ...]) -> Tensor:
    """The rows of x (batch, rows, heads, head dim) that count, in the pages that `table` (batch,
    pages of a sequence) has for them; all else is NaN."""
    found = poisoned(pages, page_size, *x.shape[2:], like=x)
    for b, count in enumerate(used):
        for i in range(0, count, page_size):
            rows = x[b, i : min(i + page_size, count)]
            found[int(table[b, i // page_size]), : len(rows)] = rows
    return found


def table_of(used: tuple[int, ...], page_size: int, seed: int) -> tuple[Tensor, int]:
    """A page table, with pages in random order and nonsense behind those in use; and the number of
    pages."""
    counts = [-(-n // page_size) for n in used]
    width, total = max([*counts, 1]) + 1, sum(counts) + 3
    free = random.Random(seed).sample(range(total), total)
    table = torch.full((len(used), width), -(2**30), dtype=torch.int32)
    for b, count in enumerate(counts):
        for i in range(count):
            table[b, i] = free.pop()
    return table, total


def padded_left(x: Tensor, pads: tuple[int, ...]) -> Tensor:
    """A cache whose entry b has `pads[b]` rows of NaN before its first key."""
    cache = poisoned(x.shape[0], x.shape[1] + max(pads), *x.shape[2:], like=x)
    for b, pad in enumerate(pads):
        cache[b, pad : pad + x.shape[1]] = x[b]
    return cache


def arguments(
    case: AttentionCase,
    inputs: Inputs,
    page_size: int = 0,
    new: int | tuple[int, ...] = 0,
    shuffled: bool = False,
    leftpad: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """The arguments of a case without cu_seqlens_k: with `page_size`, k and v are in pages; the
    last `new` keys of each sequence are to be appended, packed if it has a number for each; with
    `shuffled`, sequences are in other entries of the cache or rows of the page table, by
    cache_batch_idx; keys begin `leftpad` rows behind a cache's first."""
    used = case.used_k or (case.seqlen_k,) * case.batch
    k, v, device = inputs.k.clone(), inputs.v.clone(), inputs.q.device
    more: dict[str, Any] = {}
    news = (new,) * case.batch if isinstance(new, int) else new
    if any(news):
        for name, x in (("k", k), ("v", v)):
            rows = [
                x[b, n - m : n].clone() for b, (n, m) in enumerate(zip(used, news, strict=True))
            ]
            more[name] = torch.stack(rows) if isinstance(new, int) else torch.cat(rows)
            for b, (n, m) in enumerate(zip(used, news, strict=True)):
                x[b, n - m : n] = poisoned(m, *x.shape[2:], like=x)
    if not isinstance(new, int):
        ends = torch.tensor((0, *new)).cumsum(0).to(torch.int32)
        more["cu_seqlens_k_new"] = ends.to(device)
        for name in "kv":  # rows of no sequence
            more[name] = torch.cat((more[name], poisoned(2, *more[name].shape[1:], like=k)))
    pads = leftpad or (0,) * case.batch
    if leftpad is not None:
        k, v = (padded_left(x, pads) for x in (k, v))
        more["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32, device=device)
    if page_size:
        ends = tuple(n + p for n, p in zip(used, pads, strict=True))
        table, pages = table_of(ends, page_size, case.seed)
        k, v = (in_pages(x, table, page_size, pages, ends) for x in (k, v))
        for b, pad in enumerate(pads):  # before the first key
            table[b, : pad // page_size] = -(2**30)
        if shuffled:
            order = random.Random(case.seed).sample(range(case.batch + 2), case.batch)
            rows = torch.full((case.batch + 2, table.shape[1]), -(2**30), dtype=torch.int32)
            rows[order], table = table, rows
            more["cache_batch_idx"] = torch.tensor(order, dtype=torch.int32, device=device)
        more["page_table"] = table.to(device)
    elif shuffled:
        order = random.Random(case.seed).sample(range(case.batch + 2), case.batch)
        caches = []
        for x in (k, v):
            cache = poisoned(case.batch + 2, *x.shape[1:], like=x)
            cache[order] = x
            caches.append(cache)
        k, v = caches
        more["cache_batch_idx"] = torch.tensor(order, dtype=torch.int32, device=device)
    if case.used_k is not None or page_size or any(news) or leftpad is not None:
        lengths = [n - m + p for n, m, p in zip(used, news, pads, strict=True)]
        more["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if inputs.cu_seqlens_q is not None:
        more["cu_seqlens_q"], more["max_seqlen_q"] = inputs.cu_seqlens_q, max(case.lengths_q or ())
    return {
        "q": inputs.q, "k_cache": k, "v_cache": v, "softmax_scale": case.scale,
        "causal": case.causal, "window_size": case.window, "softcap": case.softcap,
        "learnable_sink": inputs.sink, **more,
    }  # fmt: skip


def in_fp8(case: AttentionCase, inputs: Inputs) -> tuple[Inputs, Inputs, dict[str, Tensor]]:
    """The inputs with k and v in e4m3, what these stand for, and the scales."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.batch, case.heads_kv
    scales = {
        f"{name}_descale": torch.rand(shape, generator=generator).to(inputs.q.device) / 16 + 0.01
        for name in "kv"
    }
    narrow, exact = {}, {}
    for name in "kv":
        scale = scales[f"{name}_descale"][:, None, :, None]
        # NOTE: beyond the range a CPU saturates, and a GPU has NaN
        wide = (getattr(inputs, name) / scale).clamp(-448.0, 448.0)
        narrow[name] = wide.to(torch.float8_e4m3fn)
        exact[name] = narrow[name].float() * scale
    return inputs._replace(**narrow), inputs._replace(**exact), scales


def outcome(
    case: AttentionCase,
    device: str = "cpu",
    num_splits: int = 0,
    fp8: bool = False,
    **layout: Any,
) -> str:
    """What is wrong with O and LSE of the case by flash_attn_with_kvcache; empty if nothing is."""
    inputs = case.inputs(device)
    given, scales = inputs, {}
    if fp8:
        given, inputs, scales = in_fp8(case, inputs)
    more = {**arguments(case, given, **layout), **scales, "num_splits": num_splits}
    out, lse = cutex.flash_attn_with_kvcache(**more, return_lse=True)
    found = case.check(inputs, out, lse, poisoned=False)
    return "" if found.ok else found.message
