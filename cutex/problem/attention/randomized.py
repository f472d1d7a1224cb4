"""Randomized attention problems: every feature in every combination, reproducible from a seed."""

from __future__ import annotations

import random
from typing import Any

from cutex.problem.attention import INITS
from cutex.problem.attention.case import AttentionCase
from cutex.problem.attention.shapes import VIEWS

HEAD_DIMS = ((64, 64), (128, 128), (96, 96), (192, 192), (256, 256), (192, 128))
HEADS = ((1, 1), (2, 2), (3, 3), (4, 2), (4, 1), (6, 2), (5, 1), (8, 1))
ALIGNED = VIEWS[: VIEWS.index("shifted")]  # TMA can step through them


def draw(
    seed: int,
    largest: float = 8,
    most_work: int = 2**24,
    kernel: int | None = None,
    head_dims: tuple[tuple[int, int], ...] = HEAD_DIMS,
) -> AttentionCase:
    """A problem sampled from `seed`, with sequences up to 2^largest.

    most_work: the limit of pairs of a query and a key, seen or not, times heads and head_dim +
    head_dim_v. kernel: the seed of everything that a kernel is compiled for (head dims, dtype,
    band, options, how sequences are separated), by default `seed`; sizes, views and data are
    sampled from `seed`.
    """
    r = random.Random(seed)
    of_kernel = random.Random(f"kernel {seed if kernel is None else kernel}")
    what, kind = _what(of_kernel, head_dims)
    heads_q, heads_kv = r.choice(HEADS)
    batch = r.choice((1, 1, 2, 3))
    width = what["head_dim"] + what["head_dim_v"]
    lengths = _lengths(r, batch, largest)
    while sum(q * k for q, k in lengths) * heads_q * width > most_work:
        lengths = _lengths(r, batch, largest)
        heads_q, heads_kv = r.choice(HEADS[:5])
    longest = max(max(x) for x in lengths)
    return AttentionCase(
        **{**what, "window": _bounds(r, what["window"], longest)},
        heads_q=heads_q,
        heads_kv=heads_kv,
        scale=r.choice((0.03, 0.5)) if r.random() < 0.15 else None,
        views=_views(r),
        init=r.choice(INITS) if r.random() < 0.5 else "normal",
        seed=seed,
        **_sizes(r, kind, lengths),
    )


def _what(r: random.Random, head_dims: tuple[tuple[int, int], ...]) -> tuple[dict[str, Any], str]:
    """The compiled options, and the way in which sequences are separated; a bounded side of the
    window is True."""
    head_dim, head_dim_v = r.choice((*head_dims[:2], *head_dims))  # the common ones twice
    windows = ((True, None), (True, None), (None, True), (True, True))
    what = {
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": r.choice(("bf16", "bf16", "fp16")),
        "causal": r.random() < 0.4,
        "window": r.choice(windows) if r.random() < 0.35 else (None, None),
        "softcap": r.choice((5.0, 30.0)) if r.random() < 0.15 else 0.0,
        "sink": r.random() < 0.15,
    }
    return what, r.choice(("dense",) * 5 + ("packed",) * 3 + ("used", "packed used", "packed q"))


def _lengths(r: random.Random, batch: int, largest: float) -> list[tuple[int, int]]:
    """The numbers of queries and of keys of each sequence."""

    def length() -> int:
        kind = r.random()
        if kind < 0.06:
            return 0
        if kind < 0.16:
            return r.randint(1, 9)
        if kind < 0.5:  # around the edges of tiles
            edge = r.choice((64, 80, 112, 128, 144, 176, 192, 256)) * r.choice((1, 1, 2, 3))
            return min(edge + r.choice((-1, 0, 0, 1)), int(2**largest))
        return int(2 ** r.uniform(3, largest))

    relation = r.choice(("alike", "alike", "free", "free", "decoding"))
    pairs = []
    for _ in range(batch):
        q, k = length(), length()
        if relation == "alike":
            k = q
        elif relation == "decoding":
            q = r.choice((1, 1, 2, 5))
        pairs.append((q, k))
    return pairs


def _sizes(r: random.Random, kind: str, lengths: list[tuple[int, int]]) -> dict[str, Any]:
    """The fields that separate the sequences in the way `kind`: dense, by cu_seqlens, by
    seqused."""
    batch = len(lengths)
    q, k = (tuple(x) for x in zip(*lengths, strict=True))
    if kind == "dense":
        return {"batch": batch, "seqlen_q": q[0], "seqlen_k": k[0]}
    spare = r.choice((1, 3, 70))
    dense: dict[str, Any] = {"batch": batch, "seqlen_k": max(k) + spare, "used_k": k}
    match kind:
        case "packed":
            return {"batch": batch, "lengths_q": q, "lengths_k": k, "tail": r.choice((0, 3, 100))}
        case "used":
            if r.random() < 0.5:
                return {**dense, "seqlen_q": max(q)}
            return {**dense, "seqlen_q": max(q) + spare, "used_q": q}
        case "packed q":
            return {**dense, "lengths_q": q}
    return {
        "batch": batch,
        "lengths_q": tuple(n + r.choice((0, spare)) for n in q),
        "lengths_k": tuple(n + r.choice((0, spare)) for n in k),
        "used_q": q if r.random() < 0.5 else None,
        "used_k": k,
    }


def _bounds(
    r: random.Random, bounded: tuple[bool | None, bool | None], longest: int
) -> tuple[int | None, int | None]:
    """A window, each bounded side around the edges of tiles or anywhere, some off the diagonal."""
    edges = (0, 1, 63, 64, 65, 127, 128, 129, -2, -64, -65)
    sides = [r.choice(edges) if r.random() < 0.5 else r.randint(0, longest) for x in bounded if x]
    if len(sides) == 2 and max(sides) < 0:  # two negative sides are open ones to a caller
        sides[1] = -sides[1]
    left, right = (sides.pop(0) if x else None for x in bounded)
    return left, right


def _views(r: random.Random) -> tuple[str, str, str]:
    if r.random() < 0.4:
        return ("contiguous",) * 3
    q, k, v = (r.choice(VIEWS if r.random() < 0.3 else ALIGNED) for _ in range(3))
    return q, k, v
