"""A run in words and pictures: its events as sentences, its report as one HTML file."""
