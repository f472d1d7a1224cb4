"""The GEMM ladders: the stages of each arch, in order. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cutex.kernels.gemm.config import GemmConfig


@dataclass(frozen=True)
class Stage:
    """A rung of a ladder: one idea more than the rung below."""

    number: int
    arch: str
    title: str
    idea: str
    default: GemmConfig

    @property
    def module(self) -> str:
        return f"cutex.kernels.gemm.{self.arch.rstrip('a').replace('_', '')}.stage{self.number}"

    def config(self) -> GemmConfig:
        return self.default

    def kernel(self, config: GemmConfig | None = None) -> Any:
        """The kernel object, ready for cutex.compile.compile. Imports the DSL."""
        cls = getattr(import_module(self.module), f"Stage{self.number}")
        return cls(config or self.default)


_STAGES = (
    Stage(
        number=0,
        arch="sm_90a",
        title="TMA, in order",
        idea="TMA feeds wgmma through one unswizzled buffer; every step waits for the last",
        default=GemmConfig(tile_n=128),
    ),
    Stage(
        number=0,
        arch="sm_100a",
        title="TMA, in order",
        idea="TMA feeds tcgen05 through one unswizzled buffer; every step waits for the last",
        default=GemmConfig(tile_n=128),
    ),
)


def stages(arch: str) -> list[Stage]:
    """The ladder of `arch`, from stage 0 up; ValueError if there is none."""
    ladder = sorted((s for s in _STAGES if s.arch == arch), key=lambda s: s.number)
    if not ladder:
        known = ", ".join(sorted({s.arch for s in _STAGES}))
        raise ValueError(f"arch {arch!r} has no GEMM ladder, there are ladders for {known}")
    return ladder


def stage(arch: str, number: int) -> Stage:
    """Stage `number` of `arch`; ValueError if there is none."""
    ladder = stages(arch)
    for s in ladder:
        if s.number == number:
            return s
    raise ValueError(
        f"stage {number} is not in the ladder of {arch}, which has 0 to {len(ladder) - 1}"
    )
