"""One module a revision of the store's tables, each after the one that it names."""
