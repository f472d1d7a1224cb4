"""Stage 2 of Hopper's ladder, but each round waits for its own wgmma: simpler, is that slower?"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

import cutex
from cutex.compile import compile
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.stage2 import Stage2
from cutex.problem.gemm import GemmProblem


class InOrder(Stage2):
    @cute.jit
    def mainloop(self, loads, mma, barriers):
        ab, n, warp = barriers.ab, loads.num_k_tiles, cute.arch.warp_idx()
        fill, take = ab.producer(), ab.consumer()
        if warp == 0:
            for k_tile in cutlass.range(cutlass.min(ab.num_slots, n), unroll=1):
                loads.load(k_tile, fill.slot, ab.acquire(fill))
                fill.advance()
        for k_tile in cutlass.range(n, unroll=1):
            ab.wait_full(take)
            mma.issue(take.slot, accumulate=k_tile > 0)
            warpgroup.wait_group(0)  # stage 2: 1
            ab.release(take)
            take.advance()
            if warp == 0 and k_tile + ab.num_slots < n:
                loads.load(k_tile + ab.num_slots, fill.slot, ab.acquire(fill))
                fill.advance()


problem = GemmProblem(128, 256, 1024)
for stage in (Stage2, InOrder):
    kernel = compile(stage(Sm90Config(tile_n=256, num_stages=4)), "bf16", "sm_90a")
    a, b = problem.inputs()
    c = problem.output()
    report = cutex.simulate(kernel, a, b, c, order="random", seed=1, time=True)
    print(
        f"{stage.__name__}: {problem.check(a, b, c).message}, {report.times[0].cycles:,.0f} cycles"
    )
