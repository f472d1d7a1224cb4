"""cutex.attention.activate: attention of other libraries on our kernel."""

from __future__ import annotations

from importlib.util import find_spec

from cutex.ops.attention import in_torch

__all__ = ["activate", "deactivate"]


def activate() -> None:
    """Let torch's attention run on cutex, and give it to transformers under the name "cutex".

    From then on torch.nn.functional.scaled_dot_product_attention and torch.nn.attention.varlen run
    on our kernel what it takes (bfloat16 and float16 of its head dims; no mask but causal and
    windows, no dropout) and as before what it does not; torch.nn.attention lists it as the flash
    implementation "cutex". Where transformers is installed, models take
    `attn_implementation="cutex"`. Raises ValueError, in one sentence, where there is neither a GPU
    nor the simulator, and with a torch before 2.11.
    """
    in_torch.activate()
    if find_spec("transformers") is not None:
        from cutex.ops.attention import in_transformers

        in_transformers.register()


def deactivate() -> None:
    """Give torch its own kernels back."""
    in_torch.deactivate()
