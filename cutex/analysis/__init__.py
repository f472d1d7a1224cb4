"""What is known of a kernel without timing it: rooflines, bounds, layouts."""
