"""Grouped GEMM as the ladder computes it: groups by a rule, data, reference, tolerance, peers."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.dtypes import DTYPES as ELEMENTS
from cutex.peers import grouped_gemm
from cutex.problem.protocol import Check, Launch, PeerKernel, Problem, Sizes

if TYPE_CHECKING:
    import torch

INITS = ("int", "normal", "uniform", "zeros")
UNIT = 8  # elements of 16 bytes, which TMA steps by
MOST_GROUPS = 128
# by how the rows are shared out: equally; by Zipf's law, in an order of its own; a half to one
# group; to every second group
SKEWS = ("even", "zipf", "hot", "empty")
NAMES = ("groups", "m", "n", "k", "skew")


def _of(*sizes: tuple[int, int, int, int, str]) -> tuple[Sizes, ...]:
    return tuple(dict(zip(NAMES, given, strict=True)) for given in sizes)


@dataclass(frozen=True)
class GroupedGemmProblem(Problem):
    """out[rows of e] = x[rows of e] @ w[e]^T for `groups` groups that `m` rows belong to, x (M, K),
    w (E, N, K), accumulated in fp32, out (M, N) in the input dtype.

    Raises ValueError for sizes below one, K or N that TMA cannot stride, unknown names.
    """

    op = "gemm_grouped"
    title = "grouped GEMM"
    about = "the grouped GEMM ladder, rows of each group times its matrix"
    dtypes = ("bf16",)
    inits = INITS
    size_options = ("--groups",)
    wave_tile = (128, 256)
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        "cuda": _of((32, 16384, 4096, 7168, "even")),
        "sim": _of((4, 640, 512, 768, "zipf")),
        "sweep": _of(
            (4, 32768, 4096, 7168, "even"), (8, 32768, 7168, 2048, "even"),
            (32, 16384, 4096, 7168, "even"), (32, 16384, 4096, 7168, "zipf"),
            (128, 8192, 1536, 2048, "even"), (8, 8192, 4096, 14336, "hot"),
        ),
        "confirm": _of((32, 16384, 4096, 7168, "even"), (128, 8192, 1536, 2048, "even")),
    }  # fmt: skip
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "torch": PeerKernel("torch grouped_mm", lambda _: grouped_gemm.torch_grouped()),
        "deepgemm": PeerKernel("DeepGEMM", grouped_gemm.deep_gemm, 20.0),
        "quack": PeerKernel("quack", lambda _: grouped_gemm.quack(), 20.0),
    }

    groups: int
    m: int
    n: int
    k: int
    skew: str = "even"
    dtype: str = "bf16"
    init: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, size in (("M", self.m), ("N", self.n), ("K", self.k)):
            if size < 1:
                raise ValueError(f"{name}={size}: every size must be at least 1")
        for name, size in (("N", self.n), ("K", self.k)):
            if size % UNIT:
                raise ValueError(f"{name}={size}: must be a multiple of {UNIT}, as TMA steps")
        if not 1 <= self.groups <= MOST_GROUPS:
            raise ValueError(f"groups={self.groups}: there may be 1 to {MOST_GROUPS}")
        for what, name, known in (
            ("skew", self.skew, SKEWS), ("dtype", self.dtype, self.dtypes),
            ("init", self.init, INITS),
        ):  # fmt: skip
            if name not in known:
                raise ValueError(f"{what} {name!r} is not one of {', '.join(known)}")

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of each group."""
        shares = [1.0] * self.groups
        if self.skew == "zipf":
            shares = [1 / (i + 1) for i in range(self.groups)]
            random.Random(self.groups).shuffle(shares)
        elif self.skew == "hot":
            shares[self.groups // 2] = max(1.0, self.groups - 1.0)
        elif self.skew == "empty":
            shares = [float(i % 2 == 0) for i in range(self.groups)]
        total, ends = sum(shares), [0]
        for i in range(self.groups):
            ends.append(round(self.m * sum(shares[: i + 1]) / total))
        return tuple(end - begin for begin, end in pairwise(ends))

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """The least traffic: x and the matrices of groups with rows read once, out written once."""
        matrices = sum(rows > 0 for rows in self.rows) * self.n * self.k
        return ELEMENTS[self.dtype].bytes(self.m * (self.n + self.k) + matrices)

    # ---- parts of the work

    def grid(self, tile: Sequence[int]) -> int:
        return sum(-(-rows // tile[0]) for rows in self.rows) * -(-self.n // tile[1])

    def steps(self, tile: Sequence[int], step_flops: int) -> int:
        return -(-self.k // (step_flops // (2 * tile[0] * tile[1])))

    def tile(self, config: Any) -> tuple[int, int]:
        return config.tile_m, config.tile_n

    def work(self, config: Any) -> tuple[float, float]:
        step_k = config.k_of(16)
        steps = -(-self.k // step_k)
        tile = 2.0 * config.tile_m * config.tile_n * step_k * steps
        # NOTE: all CTAs of a cluster compute, also one whose tile is outside of its group
        down, across = getattr(config, "cluster_m", 1), getattr(config, "cluster_n", 1)
        clusters = self.grid((config.tile_m * down, config.tile_n * across))
        return clusters * down * across * tile, tile / config.ctas

    # ---- data and judgement

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor, ...]:
        """x (M, K), w (E, N, K), and where the groups end (E), int32.

        int: integers in [-2, 2], whose sums fp32 holds exactly; normal: mean 0, deviation 1;
        uniform: [-1, 1). `copy` numbers independent draws.
        """
        import torch

        generator = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy)

        def draw(*shape: int) -> torch.Tensor:
            x = torch.zeros(shape, dtype=ELEMENTS[self.dtype].torch, device=device)
            match self.init:
                case "int":
                    x.random_(-2, 3, generator=generator)
                case "normal":
                    x.normal_(generator=generator)
                case "uniform":
                    x.uniform_(-1, 1, generator=generator)
            return x

        ends = torch.tensor(self.rows).cumsum(0).int()
        return draw(self.m, self.k), draw(self.groups, self.n, self.k), ends.to(device)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor]:
        import torch

        dtype = ELEMENTS[self.dtype].torch
        return (torch.full((self.m, self.n), torch.nan, dtype=dtype, device=device),)

    def launcher(self, kernel: Launch, arguments: Sequence[str]) -> Launch:
        def launch(
            x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, out: torch.Tensor
        ) -> object:
            given = {"a": x, "b": w.mT, "edges": ends, "out": out}
            return kernel(*(given[name] for name in arguments))

        return launch

    def reduced(self) -> GroupedGemmProblem:
        def less(size: int, most: int) -> int:
            return size if size <= most else most + size % most

        m, n, k = less(self.m, 512), less(self.n, 512), less(self.k, 256)
        return replace(self, groups=min(self.groups, 6), m=m, n=n, k=k, init="int")

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare out (M, N) with the product of each group in float64.

        int and zeros: every element exact, rounded once. Others: within half a unit of the result's
        last place and what tensor cores lose, which add 16 products at a time and truncate the sum:
        half a unit of it in the mean, at most 6 sqrt(K) of which two thirds on the way.
        """
        import torch

        x, w, ends, out = tensors
        exact, begin, worst, allowed = self.init in ("int", "zeros"), 0, 0.0, 0.0
        for group, end in enumerate(ends.tolist()):
            want = x[begin:end].double() @ w[group].double().mT
            if exact:
                want, limit = want.to(out.dtype).double(), torch.zeros_like(want)
            else:
                limit = 2.0**-8 * want.abs() + 2.0**-23 * (self.k / 16) * 2 * self.k**0.5
            error = (out[begin:end].double() - want).abs()
            bad = ~(error <= limit)  # a NaN too
            if bad.any():
                i, j = (int(at) for at in bad.nonzero()[0])
                where = f"out[{begin + i}, {j}] of group {group}"
                if tile is not None:
                    where += f" (its tile {i // tile[0]}, {j // tile[1]})"
                found, due = float(out[begin + i, j]), float(want[i, j])
                message = f"{where} is {found:g}, not {due:g}; {int(bad.sum())} of it are wrong"
                return Check(False, float(error.max()), float(limit[i, j]), message)
            if end > begin:
                worst = max(worst, float(error.max()))
                allowed = max(allowed, float(limit.max()))
            begin = end
        return Check(True, worst, allowed, "exact" if exact else f"within {allowed:.3g}")

    # ---- names and options

    @classmethod
    def size_name(cls, sizes: Sizes) -> str:
        rest = "x".join(str(sizes[name]) for name in ("m", "n", "k"))
        return f"{sizes['groups']} of {rest} {sizes['skew']}"

    @property
    def series(self) -> dict[str, int]:
        return {f"M, {self.groups} groups, N = {self.n}, K = {self.k}": self.m}

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        given = (",".join(map(str, cls.cases[on][0].values())) for on in ("cuda", "sim"))
        usual, simulated = given
        group.add_argument(
            "--groups",
            action="append",
            metavar="E,M,N,K,SKEW",
            help="groups, rows of all, N, K, and how rows are shared out: "
            f"{', '.join(SKEWS)}; may be given several times; default: {usual}, simulated "
            f"{simulated}",
        )
        if "--grouped" not in group._option_string_actions:
            what = f"the sizes are of the {cls.title}"
            group.add_argument("--grouped", action="store_true", default=None, help=what)

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        return [_parsed(text) for text in args.groups or ()]


def _parsed(text: str) -> Sizes:
    *sizes, skew = text.split(",")
    try:
        groups, m, n, k = map(int, sizes)
    except ValueError:
        raise ValueError(
            f"--groups {text}: four whole numbers and a name E,M,N,K,SKEW are needed"
        ) from None
    return {"groups": groups, "m": m, "n": n, "k": k, "skew": skew}
