"""cutex.attention.activate: our attention kernel behind the functions of other libraries."""

from __future__ import annotations

from importlib.util import find_spec

from cutex.ops.attention import in_torch

__all__ = ["activate", "deactivate"]


def activate() -> None:
    """Make torch's attention run on cutex, and register it in transformers under the name "cutex".

    From then on torch.nn.functional.scaled_dot_product_attention and torch.nn.attention.varlen run
    supported calls on our kernel (bfloat16 and float16 with its head dims; no mask but causal and
    windows, no dropout), and all others as before; torch.nn.attention lists it as the flash
    implementation "cutex". Where transformers is installed, models take
    `attn_implementation="cutex"`, or "cutex_flash_3", transformers' own path for flash attention on
    our functions, which continuous batching wants; and those with experts
    `experts_implementation="cutex"`. Raises ValueError, in one sentence, where there is neither a
    GPU nor the simulator, and with a torch before 2.11.
    """
    in_torch.activate()
    if find_spec("transformers") is not None:
        from cutex.ops.attention import in_transformers, in_transformers_flash
        from cutex.ops.mixture import experts

        in_transformers.register()
        in_transformers_flash.register()
        experts.register()


def deactivate() -> None:
    """Restore torch's own kernels."""
    in_torch.deactivate()
