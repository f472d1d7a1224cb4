"""The FlashAttention backward on Blackwell."""
