"""Tables, charts and pages of simulations."""
