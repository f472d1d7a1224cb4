"""A stage of a ladder, of any operator, and how to find one.

The ladders of an operator are `cutex.kernels.<op>.LADDERS`; a stage that chooses its config for
each problem asks `cutex.kernels.<op>.choose`. Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from cutex.arch import Arch, arch, kernels_of
from cutex.problem.protocol import Problem

if TYPE_CHECKING:
    from cutex.compile import Kernel


class Config(Protocol):
    """How a kernel cuts a problem up: a frozen dataclass, whole in the compile key."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def why_not(self, problem: Any, arch: Arch) -> str | None:
        """Why this config cannot run `problem` (or, for None, anything) on `arch`."""


@dataclass(frozen=True)
class Stage:
    """A rung of a ladder: one idea more than the rung below. Each operator has its subclass."""

    op: ClassVar[str]

    number: int
    arch: str
    title: str
    idea: str
    default: Any  # a Config
    chooses: bool = False  # a config for each problem: cutex.kernels.<op>.choose, and by time

    @property
    def module(self) -> str:
        return f"{package(self.op, self.arch)}.stage{self.number}"

    def config(self) -> Any:
        return self.default

    def config_from_row(self, row: dict[str, Any]) -> Any:
        """The config that a row of a ledger or a cache holds; TypeError or ValueError if none."""
        return type(self.default)(**row)

    def kernel(self, config: Any = None) -> Kernel:
        """The kernel object, ready for cutex.compile.compile. Imports the DSL."""
        cls = getattr(import_module(self.module), f"Stage{self.number}")
        return cls(config or self.default)

    def fitted(self, problem: Problem) -> Self:
        """The stage with what its config has to know of `problem`, such as the size of a head."""
        return self

    # ---- configs for each problem

    @property
    def chooser(self) -> str:
        """The module that ranks configs."""
        return f"cutex.kernels.{self.op}.choose"

    def choose(self, problem: Problem) -> Config:
        """The config that the model ranks first."""
        return import_module(self.chooser).choose(problem, arch(self.arch))

    def shortlist(self, problem: Problem, count: int) -> list[Config]:
        """The `count` configs that are most worth a try."""
        return import_module(self.chooser).shortlist(problem, arch(self.arch), count)


S = TypeVar("S", bound=Stage)


@dataclass(frozen=True)
class Ladders(Generic[S]):
    """All stages of an operator, of every arch."""

    title: str  # of the operator
    rungs: tuple[S, ...]

    @property
    def archs(self) -> list[str]:
        return sorted({s.arch for s in self.rungs})

    def stages(self, arch: str) -> list[S]:
        """The ladder of `arch`, from stage 0 up; ValueError if there is none."""
        ladder = sorted((s for s in self.rungs if s.arch == arch), key=lambda s: s.number)
        if not ladder:
            known = ", ".join(self.archs)
            raise ValueError(
                f"arch {arch!r} has no {self.title} ladder, there are ladders for {known}"
            )
        return ladder

    def stage(self, arch: str, number: int) -> S:
        """Stage `number` of `arch`; ValueError if there is none."""
        ladder = self.stages(arch)
        for s in ladder:
            if s.number == number:
                return s
        raise ValueError(
            f"stage {number} is not in the ladder of {arch}, which has 0 to {len(ladder) - 1}"
        )


def package(op: str, arch: str) -> str:
    """The package of an operator's kernels on `arch`, such as cutex.kernels.gemm.sm90."""
    return f"cutex.kernels.{op}.{kernels_of(arch).rstrip('a').replace('_', '')}"


def ladders(op: str) -> Ladders[Stage]:
    """The ladders of an operator."""
    return import_module(f"cutex.kernels.{op}").LADDERS


def stages(op: str, arch: str) -> list[Stage]:
    """The ladder of an operator on `arch`, from stage 0 up; ValueError if there is none."""
    return ladders(op).stages(arch)


def stage(op: str, arch: str, number: int) -> Stage:
    """One stage of an operator; ValueError if there is none."""
    return ladders(op).stage(arch, number)
