"""Step times measured, fitted, shown to users, sent to the scheduler."""
