"""What jobs are to hold: the state read, a strategy asked, the decision stored."""
