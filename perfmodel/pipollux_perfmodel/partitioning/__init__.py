"""Which layers go to which stage, and what each stage then takes in seconds and bytes."""
