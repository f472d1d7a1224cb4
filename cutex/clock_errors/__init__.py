"""Studies of the error of the simulator's clock: ladders, configs, other libraries' kernels."""
