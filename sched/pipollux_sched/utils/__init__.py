"""Small things that know nothing of jobs: numbers in words, files, signals, threads."""
