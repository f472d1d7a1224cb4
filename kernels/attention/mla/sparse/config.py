"""The Hopper tiling of MLA decode of chosen keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutex.kernels.attention.mla.config import MlaConfig
from cutex.kernels.attention.mla.sm90.config import Sm90MlaConfig


@dataclass(frozen=True)
class SparseMlaConfig(Sm90MlaConfig):
    """The tiling of all keys, of which each row is a page of its own; each token of a sequence is
    an entry, with a list of keys as its page table."""

    page_size: int = 1

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        if self.page_size != 1 or self.causal:
            return f"page_size={self.page_size}, causal={self.causal}: chosen keys are single rows"
        return super().why_not(problem, arch)


CONFIGS: dict[str, type[MlaConfig]] = {"sm_90a": SparseMlaConfig}
