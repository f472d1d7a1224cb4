"""Stage 3: chosen per problem. Tiles from 64x64 to 256x128, so that few rows do not leave most SMs
idle, in a ring as deep as two CTAs of an SM allow, by a model of their time (cost_model.py). This
is the kernel behind cutex.matmul on these archs (general.py)."""

from __future__ import annotations

from cutex.kernels.gemm.sm80.stage2 import Stage2


class Stage3(Stage2):
    pass
