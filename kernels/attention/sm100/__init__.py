"""FlashAttention forward on Blackwell."""
