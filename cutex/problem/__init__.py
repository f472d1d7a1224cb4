"""Problems: what is computed, its data, its reference and its tolerance, per operator."""
