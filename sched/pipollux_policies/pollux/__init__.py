"""The genetic policy of Pollux."""
