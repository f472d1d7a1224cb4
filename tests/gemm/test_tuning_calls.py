"""Calls of `cutex.matmul` while they are tuned: results as without, whatever their options, and one
sentence where there is nothing to tune."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matmul_stand_in import StandIn, agree, plain_torch
from torch import Tensor

import cutex
from cutex.cache import NoCache
from cutex.ops import building
from cutex.ops.matmul import choices, eager, plan, tuner
from cutex.ops.matmul.arrange import arrange
from cutex.ops.matmul.checks import Call
from cutex.ops.matmul.plan import forget

bf16, fp32 = torch.bfloat16, torch.float32


class Timed:
    """The numbers of variants that were timed, each run on some copies; the last is the fastest."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, launches, copies, _) -> dict[str, float]:
        for launch in launches.values():
            for operands in copies[:3]:
                launch(*operands)
        self.counts.append(len(launches))
        return {name: float(9 - int(name)) for name in launches}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Timed]:
    """A GPU by name only, whose kernels are stand-ins, and an empty cache."""
    stand_in, timed = StandIn(monkeypatch), Timed()
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr("cutex.bench.autotune.remembered", lambda *_: None)
    monkeypatch.setattr(plan, "other_sms", lambda _: 0)
    monkeypatch.setattr(plan, "other_board", lambda _: "")
    monkeypatch.setattr(tuner, "kernel_for", eager.kernel_for)
    monkeypatch.setattr(tuner, "launcher", stand_in.launcher)
    monkeypatch.setattr(tuner, "CANDIDATES", 3)
    monkeypatch.setattr(building, "build", lambda jobs, seconds=None: [True] * len(jobs))
    monkeypatch.setattr(building, "start", lambda: [])
    choose = tuner.choose_by_time
    monkeypatch.setattr(
        tuner, "choose_by_time", lambda call, arch, seconds: choose(call, arch, seconds, timed)
    )
    forget()
    yield timed
    eager.PLANS.forget()
    choices._preferred.clear()
    forget()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = bf16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


A, B = normal(16, 32), normal(32, 24, seed=1)


def given() -> dict[str, tuple[Tensor, Tensor, dict]]:
    """Calls by what is special about them."""
    wide = normal(16, 24, seed=2)
    e4m3 = torch.float8_e4m3fn
    scales = {"scale_a": torch.rand(16) + 0.5, "scale_b": torch.rand(24) + 0.5}
    return {
        "bias and residual": (A, B, {"bias": B[0], "residual": wide, "activation": "silu"}),
        "beta": (A, B, {"out": wide, "beta": 2.0}),
        "beta and amax": (A, B, {"out": wide, "beta": 2.0, "amax": torch.zeros(1)}),
        "out is residual": (A, B, {"out": wide, "residual": wide, "amax": torch.zeros(1)}),
        "equal rows": (A[:1].expand(16, 32), B, {}),
        "equal columns": (A, B[:, :1].expand(32, 24), {}),
        "an equal batch": (A.expand(3, 16, 32), normal(3, 32, 24), {}),
        "overlapping rows": (normal(300).as_strided((16, 32), (8, 1)), B, {}),
        "no K": (A[:, :0], B[:0], {"bias": B[0]}),
        "no rows": (A[:0], B, {}),
        "a gate": (A, B, {"activation": "gated_silu", "alpha": 0.5}),
        "fp8": (A.to(e4m3), B.mT.contiguous().mT.to(e4m3), {"out_dtype": fp32, **scales}),
    }


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", list(given()))
def test_a_tuned_call_has_the_result_of_an_untuned_one(timed: Timed, name: str) -> None:
    a, b, options = given()[name]
    copies = {k: x.clone() if isinstance(x, Tensor) else x for k, x in options.items()}
    want = plain_torch(a, b, **copies)
    with cutex.tuning():
        got = cutex.matmul(a, b, **options)
    assert agree(got, want)
    if "amax" in options:
        assert agree(options["amax"], copies["amax"]), "of this call's result alone"
    assert timed.counts == ([] if name == "no rows" else [3])


def test_small_operands_are_tuned_where_l2_is_large(timed: Timed, monkeypatch) -> None:
    """A B200's L2 holds thousands of copies of them."""
    monkeypatch.setattr(eager, "arch_of", lambda _, archs: "sm_100a")
    cutex.tune(A, B)
    assert timed.counts == [3]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_call_that_launches_nothing_is_not_tuned(timed: Timed, device: str) -> None:
    cutex.tune(A, B)
    a, b = (A[:0], B) if device == "cpu" else (A.to(device), B.to(device))
    with pytest.raises(ValueError, match="there is nothing to tune"):
        cutex.tune(a, b)  # and the tiles of the call before are not its own


@pytest.mark.parametrize("seconds", ["3", None, torch.ones(1)])
def test_the_time_is_a_number(timed: Timed, seconds) -> None:
    with pytest.raises(TypeError, match=r"^seconds must be a number, got \w+$"):
        cutex.tune(A, B, seconds=seconds)


def test_a_cache_that_cannot_be_written_costs_the_file_only(timed, monkeypatch, tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("CUTEX_CACHE", str(file))
    with pytest.warns(UserWarning, match=re.escape("kept in this process only: the cache")):
        tiles = cutex.tune(A, B)
    eager.PLANS.forget()
    assert tuner.config_for(*_arranged(), "sm_90a").tiles == tiles


def test_a_choice_is_written_whole_or_not_at_all(timed, monkeypatch, tmp_path) -> None:
    cutex.tune(A, B)
    (file,) = tmp_path.glob("choices/*")
    before = file.read_text()

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choices.remember(*_choice(), {})
    assert list(tmp_path.glob("choices/*")) == [file] and file.read_text() == before


def test_a_choice_whose_fields_are_no_numbers_is_none(timed, tmp_path) -> None:
    calls, tiles = _choice()
    choices.remember(calls, tiles, {})
    assert choices.remembered(calls) == tiles
    (file,) = tmp_path.glob("choices/*")
    entry = json.loads(file.read_text())
    entry["config"]["tile_m"] = str(entry["config"]["tile_m"])
    file.write_text(json.dumps(entry))
    assert choices.remembered(calls) is None


def _arranged() -> tuple:
    """The sizes, layouts and operations of the call A @ B."""
    arranged = arrange(Call(A, B), torch.empty(16, 24, dtype=bf16), "sm_90a")
    return arranged.sizes, (arranged.a, arranged.b, arranged.out), arranged.ops


def _choice() -> tuple[choices.CallClass, object]:
    """The class of the call A @ B and its tiles."""
    calls = tuner.call_class(*_arranged(), "sm_90a")
    return calls, next(tuner.candidates(calls)).tiles


def test_what_another_process_tuned_meanwhile_is_taken(timed: Timed) -> None:
    calls, first = _choice()
    arranged = arrange(Call(A, B), torch.empty(16, 24, dtype=bf16), "sm_90a")
    assert tuner.choose_by_time(arranged, "sm_90a", 3.0).tiles != first
    forget()
    _, second, *_ = tuner.candidates(calls)
    choices.remember(calls, first, {})
    assert cutex.tune(A, B) == first
    choices.remember(calls, second.tiles, {})
    assert cutex.tune(A, B) == second.tiles


def test_contexts_of_threads_end_in_any_order(timed: Timed) -> None:
    opened, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with cutex.tuning(7.0):
            opened.set()
            go_on.wait(60)

    thread = threading.Thread(target=other)
    with cutex.tuning(5.0):
        thread.start()
        assert opened.wait(60) and tuner.limit_of_call() == 7.0
    assert tuner.limit_of_call() == 7.0, "the other thread's, although it was opened later"
    go_on.set()
    thread.join()
    assert tuner.limit_of_call() is None


def test_each_thread_gets_the_tiles_of_its_own_call(timed: Timed, monkeypatch) -> None:
    both = threading.Barrier(2, timeout=300)
    matmul = cutex.matmul

    def meet(*args, **options) -> Tensor:
        result = matmul(*args, **options)
        both.wait()
        return result

    monkeypatch.setattr(eager, "matmul", meet)
    found = {}
    calls = {24: (A, B), 4096: (normal(512, 256), normal(256, 4096))}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: cutex.tune(*calls[n])})) for n in calls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(eager, "matmul", matmul)
    assert found == {n: cutex.tune(*calls[n]) for n in calls} and found[24] != found[4096]


def test_without_a_gpu_no_process_is_started(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(building, "start", lambda: pytest.fail("started"))
    with cutex.tuning():
        pass


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(building, "build", lambda *_: pytest.fail("compiled"))
    arranged = arrange(Call(A, B), torch.empty(16, 24, dtype=bf16), "sm_90a")
    arranged.tensors[0] = SimpleNamespace(is_cuda=True)
    assert tuner.choose_by_time(arranged, "sm_90a", 3.0) is not None


def test_a_choice_is_refused_where_others_could_write(timed, monkeypatch, tmp_path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NoCache, match="everybody can write"):
        choices.remember(*_choice(), {})
