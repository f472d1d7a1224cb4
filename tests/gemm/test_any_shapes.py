"""The corpus of products of sizes that no model has."""

from __future__ import annotations

from collections import Counter

import pytest

from cutex.dtypes import DTYPES as ELEMENTS
from cutex.fit.proposals import arranged
from cutex.problem import any_shapes
from cutex.problem.any_shapes import ALIGNMENTS, DTYPES, LARGEST, alignment, shapes
from cutex.sweep import main


def test_sizes_are_log_uniform_and_passes_and_halves_alike():
    entries = shapes("bf16", 400)
    for side in range(3):
        sizes = sorted(e.problem.mnk[side] for e in entries)
        assert sizes[0] >= 1 and sizes[-1] <= LARGEST
        # log-uniform: a quarter of the problems between two powers of 2^3.5
        assert 0.15 < sum(n > LARGEST**0.75 for n in sizes) / 400 < 0.35
    passes = Counter(e.problem.direction for e in entries)
    assert min(passes.values()) > 100 and len(passes) == 3
    assert 150 < sum(e.fits for e in entries) < 250


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_operand_is_copied_and_gradients_of_odd_sides_are_read_as_they_are(dtype: str):
    unit = 128 // ELEMENTS[dtype].bits
    kinds = Counter()
    for e in shapes(dtype, 100):
        m, n, k = e.problem.mnk
        kinds[alignment(e.problem.mnk)] += 1
        assert n % unit == 0 and (k % unit == 0 or e.problem.direction == "wgrad")
        found, _ = arranged(*e.problem.inputs("meta"), *e.problem.outputs("meta"))
        odd = e.problem.direction == "wgrad" and m % 8 != 0 and m > 1
        assert bool(found.a.fold) == odd and not found.notes, e.name
    assert all(kinds[a] > 10 for a in ALIGNMENTS)


def test_a_longer_corpus_begins_with_a_shorter_and_another_seed_is_another():
    assert shapes("fp16", 30) == shapes("fp16", 60)[:30]
    ours, others = ({e.name for e in shapes("fp16", 60, seed)} for seed in ("any", "other"))
    assert len(ours & others) < 3


def test_the_reporting_halves_of_both_corpora_are_known_by_name():
    reported = any_shapes.reported()
    assert not any(e.fits for e in reported.values())
    assert {e.name for e in shapes("e4m3") if not e.fits} < reported.keys()
    assert {e.source == "any" for e in reported.values()} == {True, False}


def test_the_sweep_lists_either_corpus(capsys):
    assert main(["--corpus", "any", "--dtype", "fp16", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == sum(not e.fits for e in shapes("fp16"))
    assert main(["--corpus", "any", "--seed", "x", "--dtype", "fp16", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0] != names[0]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--dtype", "fp16"], "--dtype fp16: the corpus models has bf16, e4m3"),
        (["--seed", "x"], "--seed x: only the corpus any is sampled"),
    ],
)
def test_what_a_corpus_has_not_is_one_sentence(argv, says, capsys):
    assert main([*argv, "--list"]) == 2
    assert says in capsys.readouterr().err
