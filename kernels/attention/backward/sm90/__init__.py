"""The FlashAttention backward on Hopper."""
