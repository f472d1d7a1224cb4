"""Families of data: how the scores of attention may be distributed, by name.

A kernel must be as fast, and as right, on all of them. Each changes a Gaussian q or k, (batch or 1,
rows, heads, head_dim), in place; v stays Gaussian. This module does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Generator, Tensor

Case = Any  # an AttentionCase, whose module imports this one
Change = Callable[[Case, "Tensor", str, "Generator"], None]

DTYPES = ("bf16", "fp16")

WILD = 8.0  # the factor of q in the wild heads of "wild heads"
HOT_EVERY = 128  # keys, one of which is hot
ALONG = 12.0  # length of what q and the hot keys have in common
SINK = 60.0  # the scaled score of a sink


def _times(factor: float) -> Change:
    """Scores of a standard deviation of `factor`."""

    def change(case: Case, x: Tensor, side: str, generator: Generator) -> None:
        if side == "q":
            x.mul_(factor)

    return change


def _zeros(case: Case, x: Tensor, side: str, generator: Generator) -> None:
    """Scores of 0: O is the mean of v."""
    x.zero_()


def _qk_norm(case: Case, x: Tensor, side: str, generator: Generator) -> None:
    """q and k of norm 1.5 sqrt(head_dim), times a log-normal gain for each column."""
    gains = _normal(x.shape[-1:], x, generator).mul(0.5).exp()
    x.mul_(1.5 * gains / x.float().square().mean(-1, keepdim=True).sqrt())


def _sink(case: Case, x: Tensor, side: str, generator: Generator) -> None:
    """Keys of log-normal length; key 0 of each sequence has a score of 60 for every query."""
    common = 20.0 / x.shape[-1] ** 0.5  # a vector of length 20, all columns alike
    if side == "q":
        x.mul_(2.0).add_(common)
        return
    x.mul_(_normal((*x.shape[:-1], 1), x, generator).mul(0.8).exp())
    score = 20.0 * common * x.shape[-1] ** 0.5 * abs(case.softmax_scale)  # of a key like `common`
    for keys in _keys(case, x):
        keys[:1] = SINK / score * common


def _hot_keys(case: Case, x: Tensor, side: str, generator: Generator) -> None:
    """One key in every 128, anywhere in them, has a score of 12 or more for every query."""
    common = ALONG / x.shape[-1] ** 0.5
    if side == "q":
        x.add_(common)
        return
    score = ALONG * ALONG * abs(case.softmax_scale)  # of a key like `common`
    blocks = -(-x.shape[1] // HOT_EVERY)
    at = _below(HOT_EVERY, (blocks,), x, generator)
    heat = ALONG / score * (1 + _normal((blocks,), x, generator).abs())
    for keys in _keys(case, x):
        for block in range(-(-keys.shape[0] // HOT_EVERY)):
            key = block * HOT_EVERY + int(at[block])
            keys[key : key + 1] = heat[block] * common


def _along_keys(step: float) -> Change:
    """Scores that rise by `step` from each key to the next, so that a row's maximum moves with
    every block, in one of the orders in which these may come."""

    def change(case: Case, x: Tensor, side: str, generator: Generator) -> None:
        x.mul_(0.1)
        rise: float | Tensor = 1.0
        if side == "k":
            number = x.new_ones(x.shape[1]).float().cumsum(0)[:, None, None] - 1
            rise = step / (case.head_dim * case.softmax_scale) * number
        x.add_(rise)

    return change


def _wild_heads(case: Case, x: Tensor, side: str, generator: Generator) -> None:
    """Every eighth head of q is 8 times as large."""
    if side == "q":
        x[:, :, ::8].mul_(WILD)


def _offset(case: Case, x: Tensor, side: str, generator: Generator) -> None:
    """q and k around 20, so that scores are large and nearly equal."""
    x.add_(20.0)


def _huge_key(case: Case, x: Tensor, side: str, generator: Generator) -> None:
    """One key of each sequence is 64 times as large."""
    if side == "k":
        for keys in _keys(case, x):
            if keys.shape[0]:
                keys[int(_below(keys.shape[0], (), x, generator))].mul_(64.0)


FAMILIES: dict[str, Change | None] = {
    "normal": None,
    "offset": _offset,
    "rising": _along_keys(0.1),
    "falling": _along_keys(-0.1),
    "huge": _huge_key,
    "x2": _times(2.0),
    "x4": _times(4.0),
    "x8": _times(8.0),
    "x16": _times(16.0),
    "qk-norm": _qk_norm,
    "sink": _sink,
    "hot": _hot_keys,
    "wild": _wild_heads,
    "zeros": _zeros,
}
INITS = tuple(FAMILIES)


def _normal(shape: tuple[int, ...], like: Tensor, generator: Generator) -> Tensor:
    return like.new_empty(shape).float().normal_(generator=generator)


def _below(end: int, shape: tuple[int, ...], like: Tensor, generator: Generator) -> Tensor:
    """Numbers from 0 to end - 1."""
    return like.new_empty(shape).long().random_(end, generator=generator)


def _keys(case: Case, x: Tensor) -> list[Tensor]:
    """The keys (rows, heads, head_dim) of each sequence, as views of k (batch or 1, rows, heads,
    head_dim); of entries that share their memory one."""
    if case.lengths_k is not None:
        return [case.rows(x[0], s, "k") for s in case.sequences]
    entries = x if x.shape[0] == case.batch else x.expand(case.batch, -1, -1, -1)
    sequences = list(case.sequences)[: x.shape[0]]
    return [case.rows(entries, s, "k") for s in sequences]
