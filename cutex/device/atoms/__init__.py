"""The hardware instructions as CuTe atoms, with their shapes."""
