"""The pictures of a report: what they show, and the scripts that draw it in a browser."""
