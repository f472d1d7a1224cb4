"""The configs of both archs, and the rows of ledgers that contain them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cutex.arch import ARCHS, arch
from cutex.kernels.gemm import stage, stages
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config

LEDGER = Path(__file__).parent.parent / "results" / "gemm-nvidia-h200.jsonl"


def test_every_config_of_the_ledger_can_be_read_and_run() -> None:
    rows = [json.loads(line) for line in LEDGER.read_text().splitlines()]
    for row in rows:
        config = stage(row["arch"], row["stage"]).config_from_row(row["config"])
        assert isinstance(config, Sm90Config)
        assert config.why_not(None, arch(row["arch"])) is None
        read = asdict(config)
        assert all(read[name] == value for name, value in row["config"].items() if name in read)
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
