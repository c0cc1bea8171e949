"""Reports of runs: events as sentences, and one HTML file with charts."""
