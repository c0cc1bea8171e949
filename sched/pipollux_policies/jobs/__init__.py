"""Jobs as policies see them: what they run on, how long they still train, what changes cost."""
