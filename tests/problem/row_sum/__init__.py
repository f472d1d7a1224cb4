"""An operator of two launches, on any arch and without MMAs: sums of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from cutex.arch import KNOWN
from cutex.dtypes import DTYPES
from cutex.problem import Check, PeerKernel, Problem, Work
from cutex.problem.stage import Ladders, Stage, on_each

PARTS = 4  # of a row, one for each CTA


@dataclass(frozen=True)
class Config:
    threads: int = 128

    def why_not(self, problem, arch):
        return None if self.threads in (32, 64, 128) else f"threads={self.threads}: 32, 64 or 128"


class RowSumStage(Stage):
    op, by_arch = "rowsum", False


LADDERS = Ladders("row sum", on_each(KNOWN, RowSumStage(0, "", "two", "parts, sums", Config())))


@dataclass(frozen=True)
class RowSumProblem(Problem):
    op, title, about = "rowsum", "row sum", "sums of rows"
    dtypes, inits = ("fp32", "bf16", "fp16"), ("int", "normal")
    size_options = ("--rows",)
    cases: ClassVar = {
        "cuda": ({"rows": 8192, "columns": 4096},),
        "sim": ({"rows": 130, "columns": 1000},),
        "sweep": ({"rows": 8192, "columns": 8192},),
        "confirm": ({"rows": 8192, "columns": 4096},),
    }
    peers: ClassVar = {"sum": PeerKernel("torch.sum", lambda _: (peer, torch.__version__))}
    wave_tile = (1,)

    rows: int
    columns: int
    dtype: str = "bf16"
    init: str = "normal"
    seed: int = 0

    @property
    def flops(self):
        return self.rows * self.columns

    @property
    def bytes(self):
        return DTYPES[self.dtype].bytes(self.rows * self.columns) + 4 * self.rows

    @property
    def needs(self):
        return Work(fp32=self.flops, bytes={"hbm": self.bytes})

    def grid(self, tile):
        return -(-self.rows // tile[0])

    def inputs(self, device="cpu", copy=0):
        g = torch.Generator(device).manual_seed(self.seed + copy)
        x = torch.empty(self.rows, self.columns, dtype=DTYPES[self.dtype].torch, device=device)
        return (x.random_(-2, 3, generator=g) if self.init == "int" else x.normal_(generator=g),)

    def outputs(self, device="cpu"):
        return (torch.full((self.rows,), torch.nan, device=device),)

    def check(self, x, sums, tile=None):
        exact = self.init == "int"
        tolerance = 0.0 if exact else 2.0**-24 * 16 * float(x.double().abs().sum(1).max())
        error = float((sums.double() - x.double().sum(1)).abs().max())
        return Check(error <= tolerance, error, tolerance, f"off by {error:g}, tile {tile}")

    def reduced(self):
        return replace(self, rows=min(self.rows, 130), columns=min(self.columns, 1000), init="int")

    def launcher(self, kernel, arguments):
        return lambda x, sums: kernel(x, sums.new_empty(self.rows, PARTS), sums)

    def tile(self, config):
        return (1,)

    @classmethod
    def size_name(cls, sizes):
        return f"{sizes['rows']}x{sizes['columns']}"

    @property
    def series(self):
        return {f"rows of {self.columns}": self.rows}

    @classmethod
    def add_options(cls, group):
        group.add_argument("--rows")

    @classmethod
    def sizes_given(cls, args):
        given = [args.rows.split(",")] if args.rows else []
        return [{"rows": int(rows), "columns": int(columns)} for rows, columns in given]


def peer(x, sums):
    torch.sum(x, 1, dtype=torch.float32, out=sums)
