"""Tile choices made by timing: on this machine, by `cutex.tune`, or shipped with cutex for common
layers.

A choice is the tiles for a class of calls: device, sizes, layouts and epilogue. Shipped choices,
from an H200, are in cutex/measured, where they are at least 3 % faster than the model's choice, or
where that was not timed. Those of this machine are files in the cache,

    <cache>/choices/<key>.json

written under another name and renamed; a file that cannot be read, or whose config does not fit, is
ignored.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cutex import measured
from cutex.arch import BOARDS, Arch, arch
from cutex.cache import cache_dir, write_file
from cutex.compile.sources import sources_digest
from cutex.dtypes import DTYPES
from cutex.kernels.gemm import stages
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.kernels.gemm.unaligned.config import UnalignedConfig
from cutex.kernels.gemm.unaligned.few_config import FewRowsConfig
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.device.epilogue.epilogue_ops import EpilogueOp
    from cutex.kernels.gemm.layouts import OperandLayout

IN_SHARES = "cutex.kernels.gemm.sm90.in_shares"  # the kernel of calls whose K is cut so
PROMOTING = "cutex.kernels.gemm.scaled.fp8.sm90.kernel"  # the kernel of promoted calls


@dataclass(frozen=True)
class CallClass:
    """Calls that share a choice: M, N, K and batch as rounded by `config_for`, operands, ops, arch,
    the GPU's board (if not the arch's own), and its number of SMs (if not that board's)."""

    sizes: tuple[int, int, int, int]
    layouts: tuple[OperandLayout, OperandLayout, OperandLayout]
    ops: tuple[EpilogueOp, ...]
    arch: str
    num_sms: int = 0
    board: str = ""
    promoted: bool = False  # by the kernel that adds up sums of fp8 in fp32

    @property
    def target(self) -> Arch:
        """The facts of the board, with the SMs of the GPU."""
        facts = BOARDS[self.board] if self.board else arch(self.arch)
        return replace(facts, num_sms=self.num_sms) if self.num_sms else facts

    def key(self) -> dict[str, Any] | None:
        """The fields that name the choice's file; None if nothing can be timed."""
        if not torch.cuda.is_available():
            return None
        promoted = {"promoted": True} if self.promoted else {}
        return promoted | {
            "device": torch.cuda.get_device_name(),
            "sizes": list(self.sizes),
            "layouts": [repr(x) for x in self.layouts],
            "ops": [type(op).__name__ for op in self.ops],
            "arch": self.arch,
            "sms": self.num_sms,
            "dsl": metadata.version("nvidia-cutlass-dsl"),
            "sources": _sources(self.arch, self.promoted),
        }


@lru_cache
def _sources(arch_name: str, promoted: bool) -> str:
    if promoted:
        return sources_digest([PROMOTING])
    kernels = [f"{package('gemm', arch_name)}.general"]
    if arch_name == "sm_90a":
        kernels += [f"cutex.kernels.gemm.unaligned.sm90.{name}" for name in ("kernel", "few")]
        kernels.append(IN_SHARES)
    return sources_digest(kernels)


def _file(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir() / "choices" / f"{digest}.json"


def remembered(calls: CallClass) -> GemmConfig | None:
    """The tiles that were chosen for `calls` on this machine, or None."""
    key = calls.key()
    if key is None:
        return None
    try:
        entry = json.loads(_file(key).read_text(encoding="utf-8"))
        if entry["key"] != key:
            return None
        config = config_of(calls, entry["config"])
        return config if config.why_not(None, arch(calls.arch)) is None else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def config_of(calls: CallClass, row: dict[str, Any]) -> GemmConfig:
    """The config in `row`, of the kernel that takes such calls. Raises ValueError for another's."""
    if calls.promoted:
        return Fp8Config.from_row(row)
    if calls.layouts[0].fold:
        kind = FewRowsConfig if "warps" in row else UnalignedConfig
        return kind.from_row(row)
    config = stages(calls.arch)[-1].config_from_row(row)
    assert isinstance(config, GemmConfig)
    return config


def remember(calls: CallClass, tiles: GemmConfig, us: dict[str, float]) -> None:
    """Store `tiles` as the choice for `calls`; `us` are the times of the candidates in
    microseconds. Raises NoCache where that is impossible."""
    key = calls.key()
    if key is None:
        return
    entry = {"key": key, "config": asdict(tiles), "us": us}
    write_file(_file(key), json.dumps(entry, indent=1))


_preferred: dict[CallClass, GemmConfig] = {}


def prefer(calls: CallClass, tiles: GemmConfig) -> None:
    """Make `calls` take `tiles` in this process, unless others were chosen by timing."""
    _preferred[calls] = tiles


def preferred(calls: CallClass) -> GemmConfig | None:
    """The tiles given to `prefer` for `calls`, or None."""
    return _preferred.get(calls)


def shipped(calls: CallClass) -> GemmConfig | None:
    """The tiles shipped with cutex for `calls`; None without any, for a batch, and for a GPU with
    another number of SMs than the one they were timed on."""
    a = calls.layouts[0]
    if calls.num_sms or calls.sizes[3] != 1 or DTYPES[a.dtype].bits > 16 or a.fold:
        return None
    if calls.promoted:
        return None
    row = _shipped(calls.arch).get(name_of(calls))
    return None if row is None else config_of(calls, row)


def name_of(calls: CallClass) -> str:
    """The name of `calls` in the table that is shipped: M, N, K in units of 2 bytes, the contiguous
    sides of a and b, and whether their elements are of 8 bits."""
    *mnk, _ = calls.sizes
    a, b, _ = calls.layouts
    majors = ("k" if a.major == "row" else "m") + ("k" if b.major == "column" else "n")
    narrow = " fp8" if DTYPES[a.dtype].bits == 8 else ""
    return f"{'x'.join(map(str, mnk))} {majors}{narrow}"


def shipped_file(arch_name: str) -> Path:
    """The file of the shipped choices for an arch; there may be none."""
    return Path(measured.__file__).with_name(f"matmul-{arch_name}.json")


@lru_cache
def _shipped(arch_name: str) -> dict[str, dict[str, Any]]:
    """The shipped choices, by the name of a class of calls: fields that differ from the
    defaults."""
    file = shipped_file(arch_name)
    found: dict[str, dict[str, Any]] = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    )
    return found
