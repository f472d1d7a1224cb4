"""One case of attention forward: shapes, data, reference and tolerance.

O = softmax(mask(softcap(scale * Q K^T))) V and LSE, the natural logarithm of the sum of the
exponentials, with the meaning of FlashAttention's functions: a band of visible keys aligned bottom
right; grouped heads; a sink, which is one more column of scores without a value; rows that see no
key have O = 0 and LSE = -inf (with a sink, LSE = sink).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cutex.dtypes import DTYPES as ELEMENTS
from cutex.problem.attention.check import check
from cutex.problem.attention.families import FAMILIES
from cutex.problem.attention.shapes import AttentionShapes, Inputs
from cutex.problem.protocol import Check

GUARD = 64  # elements of NaN on either side of a contiguous tensor


@dataclass(frozen=True)
class AttentionCase(AttentionShapes):
    """One attention forward with its data, out of `init` and `seed`, and the check of its outputs.

    Raises ValueError, in one sentence, for values that are no valid problem.
    """

    # ---- data

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> Inputs:
        """The operands, sampled on `device` from the seed. `copy` numbers independent samples."""
        generator = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy)
        q = self._operand(0, "q", self.heads_q, self.head_dim, device, generator)
        k = self._operand(1, "k", self.heads_kv, self.head_dim, device, generator)
        v = self._operand(2, "k", self.heads_kv, self.head_dim_v, device, generator)

        def whole(numbers: tuple[int, ...] | None, cumulative: bool = False) -> Tensor | None:
            if numbers is None:
                return None
            numbers = tuple(accumulate(numbers, initial=0)) if cumulative else numbers
            return torch.tensor(numbers, dtype=torch.int32).to(device)

        sink = None
        if self.sink:
            sink = torch.randn(self.heads_q, generator=generator, device=device)
        return Inputs(
            q,
            k,
            v,
            cu_seqlens_q=whole(self.lengths_q, cumulative=True),
            cu_seqlens_k=whole(self.lengths_k, cumulative=True),
            seqused_q=whole(self.used_q),
            seqused_k=whole(self.used_k),
            sink=sink,
        )

    def _operand(
        self,
        which: int,
        side: str,
        heads: int,
        head_dim: int,
        device: str | torch.device,
        generator: torch.Generator,
    ) -> Tensor:
        lengths = getattr(self, f"lengths_{side}")
        batch, rows = self.batch, getattr(self, f"seqlen_{side}")
        if lengths is not None:
            batch, rows = 1, sum(lengths) + self.tail
        shape = batch, rows, heads, head_dim
        x, expanded = laid_out(self.views[which], shape, ELEMENTS[self.dtype].torch, device)
        x.normal_(generator=generator)
        change = FAMILIES[self.init]
        if change is not None and which < 2:
            change(self, x, side, generator)
        data = torch.zeros(x.shape[:2], dtype=torch.bool, device=device)
        for s in self.sequences:
            self.rows(data.expand(batch, -1) if lengths is None else data[0], s, side).fill_(True)
        x.masked_fill_(~data[:, :, None, None], torch.nan)
        x = x.expand(shape) if expanded else x
        return x if lengths is None else x[0]

    def outputs(self, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
        """The outputs, every element NaN until a kernel writes it: O like q with head_dim_v; LSE
        (batch, heads_q, seqlen_q) or (heads_q, total_q), float32."""
        rows = (self.batch, self.seqlen_q)
        lse: tuple[int, ...] = (self.batch, self.heads_q, self.seqlen_q)
        if self.lengths_q is not None:
            total = sum(self.lengths_q) + self.tail
            rows, lse = (total,), (self.heads_q, total)  # type: ignore[assignment]
        shape = (*rows, self.heads_q, self.head_dim_v)
        out = torch.full(shape, torch.nan, dtype=ELEMENTS[self.dtype].torch, device=device)
        return out, torch.full(lse, torch.nan, device=device)

    def check(
        self, inputs: Inputs, out: Tensor, lse: Tensor | None, poisoned: bool = True
    ) -> Check:
        """Compare O, and LSE where given, with float64; see check.py.

        poisoned: out and lse were NaN before, and must still be where no sequence has a row.
        """
        return check(self, inputs, out, lse, poisoned)


def laid_out(
    view: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str | torch.device
) -> tuple[Tensor, bool]:
    """Memory, all NaN, for a (batch, rows, heads, head_dim) tensor laid out as `view` says.

    Returns the part to fill, and whether it is to be expanded to `shape`. TMA can step through all
    views but "shifted", whose rows begin anywhere, and "transposed", whose rows are contiguous.
    """
    b, s, h, d = shape

    def memory(*sizes: int) -> Tensor:
        return torch.full(sizes, torch.nan, dtype=dtype, device=device)

    match view:
        case "interleaved":  # as one GEMM leaves q, k and v
            return memory(b, s, 3, h, d)[:, :, 1], False
        case "padded":
            return memory(b, s + 2, h, d + 16)[:, 1:-1, :, 8:-8], False
        case "heads first":  # as scaled_dot_product_attention has them
            return memory(b, h, s + 2, d)[:, :, 1:-1].transpose(1, 2), False
        case "expanded":  # one entry for the whole batch, or one head for all
            sizes = (1, s + 2, h, d) if b > 1 else (b, s + 2, 1, d)
            return memory(*sizes)[:, 1:-1], True
        case "shifted":
            return memory(b, s + 2, h, d + 3)[:, 1:-1, :, 3:], False
        case "transposed":
            return memory(b, h, d, s + 2)[..., 1:-1].permute(0, 3, 1, 2), False
    size = b * s * h * d
    return memory(size + 2 * GUARD)[GUARD : GUARD + size].view(shape), False
