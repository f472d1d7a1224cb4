"""The epilogue: operations on an accumulator, rounding, and stores to global memory.

`epilogue_ops` is the same for all archs; `sm90` starts from wgmma's registers, `sm100` from tensor
memory. In both, `register_store` stores from registers, `tma_store` through shared memory by TMA,
and `fused_store` runs operations first.
"""
