"""Which layers go to which stage, on which device."""
