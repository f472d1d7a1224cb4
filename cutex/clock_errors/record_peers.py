"""Records of quack's GEMM and of flash-attn-4's forward, as their users call them, on sm_90a.

    CUTE_DSL_ARCH=sm_90a python -m cutex.clock_errors.record_peers quack fa4

needs the extra `peers` and takes a quarter of an hour. For the rows that were measured it writes
results/timing/traces-*-sm_90a.json.gz; `python -m cutex.clock` computes their errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cutex.arch import arch
from cutex.bench.clock import STEPS, TILES
from cutex.clock_errors.foreign import QUACK, row_of, traces_file
from cutex.clock_errors.page import MEASURED
from cutex.command import Parser, answered, refuse
from cutex.problem import problem_class
from cutex.sim.__main__ import NO_DISK_CACHES
from cutex.sim.host.calls import CapturedKernel
from cutex.sim.host.capture import HostTensor
from cutex.sim.host.dsl_stand_in import Calls, dsl_on_cpu
from cutex.sim.host.torch_stand_in import DeviceMemory, torch_on_cpu
from cutex.sim.timing import stored
from cutex.sim.timing.lengths import Lengths
from cutex.sim.timing.trace import Traced, look_at, trace

ARCH = "sm_90a"
FA4_TILES = {64: (192, 128), 128: (128, 128), 256: (128, 80)}  # by head dim: queries, keys
FA4_L2 = 50 << 20  # bytes of K and V of the heads that its causal order groups
DRAWN = 4096  # tokens up to which tensors get random data: of larger ones only loads matter


class Recording(Calls):
    """Passes each launch's host code, programs, arguments and tensors to ``how``, and keeps the
    record; the launch does not run."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__("fifo", 0, memory)
        self.how: Callable[..., Traced] = lambda h, p, a, r: trace(h, p, a, r)[0]
        self.found: list[Traced] = []

    def run(
        self,
        function: CapturedKernel,
        arguments: list[Any],
        tensors: Sequence[HostTensor] = (),
        stream: int | None = None,
    ) -> None:
        named = [*tensors, *(a for a in arguments if isinstance(a, HostTensor))]
        regions = self.memory.regions(named)
        self.found.append(self.how(function.host, function.programs, arguments, regions))

    def of(self, call: Callable[[], Any], how: Callable[..., Traced]) -> Traced:
        """Return ``how``'s record of the one launch of ``call``."""
        self.how, self.found = how, []
        call()
        (found,) = self.found
        return found


@contextmanager
def recording() -> Iterator[Recording]:
    with torch_on_cpu(arch(ARCH)) as memory:
        calls = Recording(memory)
        with dsl_on_cpu(arch(ARCH), calls):
            yield calls


def quack(calls: Recording, row: Mapping[str, Any]) -> Traced:
    kind = problem_class(row["op"])
    p, c = row["problem"], row["config"] or QUACK
    m, n, k = p["m"], p["n"], p["k"]
    a, b, out = (empty(*shape) for shape in ((m, k), (n, k), (m, n)))
    groups = 2 if c["pingpong"] else 1
    limit = (TILES * groups - groups + 1) * 2 * c["tile_m"] * c["tile_n"] * k

    peer = kind.peers["quack"]
    if row["config"]:
        assert peer.configured is not None
        launch = peer.configured(c)
    else:
        launch, _ = peer.load(kind(**p))
    return calls.of(lambda: launch(a, b, out), lambda h, p, a, r: trace(h, p, a, r, limit)[0])


def fa4(calls: Recording, row: Mapping[str, Any]) -> Lengths:
    """Record tiles of two lengths, of one head, and the sharing of loads in the whole grid."""
    from flash_attn.cute.interface import _flash_attn_fwd

    p = row["problem"]
    dim, causal, pack = p["head_dim"], p["causal"], p["heads_q"] // p["heads_kv"]
    rows, keys = FA4_TILES[dim]
    tiles = fa4_tiles(p)

    def forward(batch: int, queries: int, tokens: int, heads: int, heads_kv: int) -> None:
        shapes = ((queries, heads), (tokens, heads_kv), (tokens, heads_kv), (queries, heads))
        q, k, v, out = (empty(batch, *shape, dim) for shape in shapes)
        if batch * tokens <= DRAWN:
            q, k, v = (torch.randn(x.shape).bfloat16().cuda() for x in (q, k, v))
        lse = torch.empty(batch, heads, queries, device="cuda")
        _flash_attn_fwd(q, k, v, out=out, lse=lse, causal=causal)

    longest = max(tiles)
    steps = min(STEPS[0], max(1, longest // 2)), min(STEPS[1], longest)
    records = []
    for n in steps:
        call = partial(forward, 1, rows // pack, n * keys, pack, 1)
        records.append(calls.of(call, lambda h, p, a, r: trace(h, p, a, r, look=False)[0]))
    short, brief = records
    sizes = (p[name] for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv"))
    long = calls.of(partial(forward, *sizes), lambda h, p, a, r: look_at(h, p, a, r, brief))
    flops = short.record.flops, brief.record.flops
    return Lengths(replace(short, grid=long.grid, sharing=long.sharing), long, steps, tiles, flops)


def fa4_tiles(p: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the key blocks of each tile, in the order of the grid: causal, the longest first, in
    groups of as many heads as have K and V in L2 together."""
    rows, keys = FA4_TILES[p["head_dim"]]
    pack = p["heads_q"] // p["heads_kv"]
    blocks = -(-p["seqlen_q"] * pack // rows)  # of queries
    heads, most = p["heads_kv"] * p["batch"], -(-p["seqlen_k"] // keys)
    if not p["causal"]:
        return (most,) * blocks * heads
    size = p["seqlen_k"] * (p["head_dim"] + p["head_dim_v"]) * 2
    together = 1 << max(0, (FA4_L2 // size).bit_length() - 1)
    beyond = p["seqlen_k"] - p["seqlen_q"]
    found: list[int] = []
    for first in range(0, heads, together):
        for block in reversed(range(blocks)):
            last = -(-(block + 1) * rows // pack) + beyond
            found += [min(most, -(-last // keys))] * min(together, heads - first)
    return tuple(found)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=torch.bfloat16)


@answered
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="CUTE_DSL_ARCH=sm_90a python -m cutex.clock_errors.record_peers",
        description="Record the kernels of other libraries that the clock is held against.",
    )
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help="quack, fa4")
    libraries: list[str] = parser.parse_args(argv).libraries
    how: dict[str, Callable[..., Traced | Lengths]] = {"quack": quack, "fa4": fa4}
    for name in libraries:
        if name not in how:
            return refuse(f"{name}: takes {' or '.join(how)}")
    if not libraries:
        return refuse(f"which libraries: {' '.join(how)}, or one of them")
    if os.environ.get("CUTE_DSL_ARCH") != ARCH:
        return refuse(
            f"CUTE_DSL_ARCH must be {ARCH}, and the CuTe DSL reads it when it is imported: run "
            f"CUTE_DSL_ARCH={ARCH} python -m cutex.clock_errors.record_peers {' '.join(libraries)}"
        )
    os.environ.update(NO_DISK_CACHES)
    rows = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    with recording() as calls:
        for name in libraries:
            found: dict[str, Traced | Lengths] = {}
            for row in rows:
                if row["kernel"] == name:
                    key = row_of(row).key
                    found[key] = how[name](calls, row)
                    print(key, flush=True)
            stored.save(found, traces_file(name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
