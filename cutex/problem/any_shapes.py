"""The corpus "any": products of sizes that no model has, beside the layers of models.py.

M, N and K are log-uniform from 1 to 16384. N and K are each rounded up to multiples of 8 (or of 16
bytes), of 64 or of 128 elements; M is not. In half of the weight gradients M is rounded and K,
their tokens, is not. All sizes derive from a hash of a problem's number, so that a longer corpus
begins with a shorter one, and another seed gives other problems of the same kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from cutex.dtypes import DTYPES as ELEMENTS
from cutex.problem import models
from cutex.problem.layer import PASSES, LayerProblem
from cutex.problem.models import MAX_BYTES, MAX_FLOPS, Entry, hash_below

DTYPES = ("bf16", "fp16", "e4m3")
LARGEST = 16384
ALIGNMENTS = (8, 64, 128)  # elements
LEAST_BYTES = 64 << 10  # smaller ones are the time of a launch, and cannot be timed cold
MULTIPLES = "multiples of "  # what a problem has in place of a layer's name
COUNT = 480  # problems of a dtype, of both halves


def shapes(dtype: str = "bf16", count: int = COUNT, seed: str = "any") -> tuple[Entry, ...]:
    """The first `count` problems of `dtype` of the corpus that `seed` names."""
    found: dict[str, Entry] = {}
    numbers = iter(range(1 << 30))
    while len(found) < count:
        problem = _problem(f"{seed} {dtype} {next(numbers)}", dtype)
        inside = problem.flops <= MAX_FLOPS and LEAST_BYTES <= problem.bytes <= MAX_BYTES
        if inside:
            entry = Entry(problem, seed, f"{MULTIPLES}{alignment(problem.mnk)}")
            found.setdefault(entry.name, entry)
    return tuple(found.values())


def reported() -> dict[str, Entry]:
    """The problems of the reporting halves of this corpus and of the models', by name."""
    every = [e for dtype in DTYPES for e in shapes(dtype)]
    every += [e for dtype in models.DTYPES for e in models.corpus(dtype)]
    return {e.name: e for e in every if not e.fits}


def alignment(mnk: tuple[int, int, int]) -> int:
    """The largest of ALIGNMENTS, or the number 1, that divides the two sides that a pitch may be:
    N, and K or, where it is no multiple of 8, M."""
    m, n, k = mnk
    sides = n, k if k % 8 == 0 else m
    return next((a for a in reversed(ALIGNMENTS) if not any(s % a for s in sides)), 1)


def _problem(name: str, dtype: str) -> LayerProblem:
    """The product that `name` draws."""
    fractions = _fractions(name)
    m, n, k = (max(1, round(LARGEST ** next(fractions))) for _ in range(3))
    bits = ELEMENTS[dtype].bits
    directions = PASSES if bits == 16 else PASSES[:1]
    direction = directions[hash_below(f"{name} pass", len(directions))]
    units = [ALIGNMENTS[hash_below(f"{name} {side}", len(ALIGNMENTS))] for side in "nk"]
    by_n, by_k = (max(unit, 128 // bits) for unit in units)
    n = -(-n // by_n) * by_n
    if direction == "wgrad" and hash_below(f"{name} tokens", 2):
        m = -(-m // by_k) * by_k
    else:
        k = -(-k // by_k) * by_k
    tokens, out_features, in_features = {
        "forward": (m, n, k),
        "dgrad": (m, k, n),
        "wgrad": (k, m, n),
    }[direction]
    return LayerProblem(tokens, out_features, in_features, direction, dtype)


def _fractions(name: str) -> Iterator[float]:
    """Numbers from 0 to 1 that depend on `name` alone."""
    digest = hashlib.sha256(name.encode()).digest()
    for i in range(0, len(digest), 8):
        yield int.from_bytes(digest[i : i + 8]) / 2**64
