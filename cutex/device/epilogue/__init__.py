"""What happens to an accumulator on its way to global memory."""
