"""The configs of both archs, and the rows of ledgers that contain them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cutex
from cutex.arch import ARCHS, BOARDS, Arch, arch
from cutex.kernels.gemm import stage, stages
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.sm90.candidates import at_once, candidates
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.cost_model import columns, count, modelled
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.ops import device
from cutex.ops.matmul import choices, plan
from cutex.ops.matmul.choices import CallClass
from cutex.problem.gemm import GemmProblem

LEDGER = Path(__file__).parents[2] / "results" / "gemm-nvidia-h200.jsonl"


def test_every_config_of_the_ledger_can_be_read_and_run() -> None:
    rows = [json.loads(line) for line in LEDGER.read_text().splitlines()]
    for row in rows:
        config = stage(row["arch"], row["stage"]).config_from_row(row["config"])
        assert isinstance(config, Sm90Config)
        assert config.why_not(None, arch(row["arch"])) is None
        read = asdict(config)
        assert all(read[name] == value for name, value in row["config"].items() if name in read)
        if "tile_k" in row["config"]:
            assert read["k_bytes"] == 2 * row["config"]["tile_k"], "older rows count 2 bytes of K"
    assert any("tile_k" in row["config"] for row in rows)
    assert any("pair" in row["config"] for row in rows), "rows from when both archs shared a config"
    assert any(len(row["config"]) == 4 for row in rows), "rows from when it had four fields"


@pytest.mark.parametrize("name", ARCHS)
def test_a_config_is_read_as_it_was_written(name: str) -> None:
    for rung in stages(name):
        row = json.loads(json.dumps(asdict(rung.config())))
        assert rung.config_from_row(row) == rung.config()


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("sm_90a", {"tile_m": 256, "pair": True}, "pair=True: no field of Sm90Config"),
        ("sm_100a", {"tile_n": 16, "spread": True}, "spread=True: no field of Sm100Config"),
        ("sm_100a", {"tile": 16}, "tile=16: no field"),
    ],
)
def test_a_row_of_another_kernel_is_refused(name: str, row: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        stage(name, 9).config_from_row(row)


@pytest.mark.parametrize("name", ARCHS)
def test_a_config_is_refused_by_the_other_arch(name: str) -> None:
    (other,) = set(ARCHS) - {name}
    for rung in stages(name):
        assert name in (rung.config().why_not(None, arch(other)) or "")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Sm90Config(tile_n=256, warpgroups=4, tile_m=256), "warpgroups=4"),
        (Sm90Config(tile_m=256, tile_n=256, warpgroups=2), "256 accumulators a thread"),
        (Sm90Config(cluster_m=3), "cluster 3x1"),
        (Sm90Config(warpgroups=2, epi_n=64), "epi_stages=0"),
        (Sm90Config(warpgroups=2, stream_k=1, pingpong=True), "takes no pingpong"),
        (Sm90Config(warpgroups=2, stream_k=1, columns=1), "stream_k=1"),
        (Sm90Config(warpgroups=2, num_stages=6, stream_k=1, split_k=2), "stream_k=1"),
        (Sm90Config(warpgroups=2, stream_k=-1), "stream_k=-1"),
        (Sm90Config(warpgroups=2, cluster_m=4, split_k=3), "at most 8 CTAs"),
        (Sm90Config(tile_n=88, epi_n=88, epi_stages=2, num_stages=4), "stored whole"),
        (Sm90Config(epi_n=64, epi_stages=2, num_stages=4, in_turns=True), "in_turns=True"),
        (Sm90Config(tile_m=64, warpgroups=1, epi_n=64, epi_stages=1, in_turns=True), "by one slot"),
        (
            Sm90Config(tile_n=24, epi_n=24, epi_stages=1, num_stages=4, swap_ab=True),
            "multiples of 16 are transposed",
        ),
        (Sm100Config(tile_n=128, epi_n=32, epi_stages=1), "epi_stages=1"),
        (Sm100Config(tile_m=512, tile_n=256, pair=True, num_acc=3), "num_acc=3"),
        (Sm100Config(tile_m=256, tile_n=256, pair=True, num_acc=3), "768 columns"),
        (Sm100Config(tile_m=256, split_k=2), "tile_m=256"),
        (Sm100Config(split_k=2), "split_k=2: takes pairs"),
        (Sm100Config(tile_m=256, tile_n=160, pair=True, epi_n=32, epi_stages=4), "two in turn"),
    ],
)
def test_a_config_that_does_not_fit_says_why(config: Sm90Config | Sm100Config, reason: str) -> None:
    assert reason in (config.why_not(None, arch(config.arch)) or "")


def test_the_ladder_refuses_what_needs_a_workspace() -> None:
    ninth = stage("sm_90a", 9)
    with pytest.raises(ValueError, match="stream_k=1"):
        ninth.kernel(Sm90Config(warpgroups=2, num_stages=4, stream_k=1))


def test_an_fp32_result_has_twice_the_sub_tiles() -> None:
    """160 columns are 5 sub-tiles of 32, in three slots; of 16 they are 10, and the last would
    share a slot with the next tile's first."""
    config = Sm100Config(tile_m=256, tile_n=160, pair=True, epi_n=32, epi_stages=3, num_stages=4)
    b200 = arch("sm_100a")
    assert config.why_not(None, b200) is None
    assert "of 10 sub-tiles" in (config.why_not(None, b200, epi_parts=10) or "")
    assert replace(config, epi_stages=4).why_not(None, b200, epi_parts=10) is None


# ---- GPUs of fewer SMs than an H200: an H100 PCIe, an H20, a part of a GPU

FEWER = [114, 78, 60, 16]
SIZES = [(1, 4096, 1024), (48, 5120, 512), (96, 4096, 4096), (320, 3072, 1024), (4096, 2048, 256)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("num_sms", FEWER)
@pytest.mark.parametrize("mnk", SIZES, ids=str)
def test_no_config_asks_for_more_ctas_at_a_time_than_run(mnk: tuple[int, int, int], num_sms: int):
    target, problem = replace(arch("sm_90a"), num_sms=num_sms), GemmProblem(*mnk)
    kinds = set()
    for c in candidates(problem, target):
        size = c.cluster_m * c.cluster_n * c.split_k
        most = at_once(size, num_sms)
        assert most <= num_sms and most % size == 0
        kinds.add((c.one_tile, c.stream_k > 0))
        if c.one_tile:
            spent = count(c, problem, target)
            assert spent.rounds == 1 and spent.ctas <= most
            assert c.num_ctas == num_sms  # as which the kernel counts those that are idle
        else:
            assert c.num_ctas == most
    assert (False, False) in kinds
    assert len(kinds) > 1 or num_sms < 60  # few SMs walk over all tiles


@pytest.mark.slow
@pytest.mark.parametrize("mnk", [(1, 4096, 512), (96, 2048, 512), (520, 1024, 256)], ids=str)
def test_calls_on_a_gpu_of_fewer_sms_take_a_config_for_it(monkeypatch, mnk: tuple[int, int, int]):
    m, n, k = mnk
    layouts = OperandLayout("bf16"), OperandLayout("bf16", "column"), OperandLayout()
    usual = plan.config_for((m, n, k, 1), layouts, (), "sm_90a").tiles
    monkeypatch.setattr(plan, "other_sms", lambda _: 60)
    plan.forget()
    try:
        with cutex.ops.simulated("sm_90a"):
            tiles = plan.config_for((m, n, k, 1), layouts, (), "sm_90a").tiles
            assert tiles != usual
            x, w = torch.randint(-2, 3, (m, k)).bfloat16(), torch.randint(-2, 3, (n, k)).bfloat16()
            y = cutex.matmul(x, w.mT)
        assert torch.equal(y, (x.float() @ w.float().mT).bfloat16())
    finally:
        plan.forget()


def test_the_sms_of_another_gpu_are_those_of_its_properties(monkeypatch):
    found = SimpleNamespace(multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "local_arch", lambda: arch("sm_90a"))
    assert device.other_sms("sm_90a") == 114 and device.other_sms("sm_100a") == 0
    with cutex.ops.simulated("sm_90a"):
        assert device.other_sms("sm_90a") == 0, "the simulator is an H200"
    found.multi_processor_count = 132
    assert device.other_sms("sm_90a") == 0


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("device_name", "board"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H20", "H200"),
    ],
)
def test_calls_know_the_board_that_torch_names(monkeypatch, device_name: str, board: str):
    monkeypatch.setattr(device, "local_arch", lambda: arch("sm_90a"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device_name)
    found = device.other_board("sm_90a")
    assert CallClass((1, 1, 1, 1), (), (), "sm_90a", board=found).target.board == board
    assert device.other_board("sm_100a") == ""
    with cutex.ops.simulated("sm_90a"):
        assert device.other_board("sm_90a") == "", "the simulator is an H200"


def test_a_board_s_memory_and_power_are_in_what_the_model_predicts():
    h200, h100 = arch("sm_90a"), BOARDS["H100 80GB HBM3"]
    weights, square = GemmProblem(16, 8192, 8192), GemmProblem(8192, 8192, 8192)

    def least(problem: GemmProblem, on: Arch) -> float:
        every = [c for c in candidates(problem, on) if c.why_not(problem, on) is None]
        return float(modelled(columns([count(c, problem, on) for c in every])).min())

    by_memory = least(weights, h100) / least(weights, h200)
    assert 1.25 < by_memory < h200.hbm_gbs / h100.hbm_gbs + 0.01
    assert 0.99 < least(square, h100) / least(square, h200) < 1.03
    half = replace(h200, watts=350)
    assert 1.3 < least(square, half) / least(square, h200) < 2.0


def test_what_was_timed_on_an_h200_is_not_shipped_to_fewer_sms(monkeypatch):
    layouts = OperandLayout("bf16"), OperandLayout("bf16", "column"), OperandLayout()
    name = next(x for x in choices._shipped("sm_90a") if x.endswith("kk"))
    sizes = *map(int, name.split()[0].split("x")), 1
    for other, num_sms in ((0, 132), (114, 114)):
        monkeypatch.setattr(plan, "other_sms", lambda _, found=other: found)
        calls = plan.call_class(sizes, layouts, (), "sm_90a")
        assert (choices.shipped(calls) is None) == (num_sms == 114)
        assert calls.target.num_sms == num_sms
