"""The charts of a report: their data, and the scripts that draw them in a browser."""
