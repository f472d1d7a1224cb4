"""FlashAttention forward on Hopper."""
