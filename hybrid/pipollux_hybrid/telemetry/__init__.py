"""Step times measured, fitted, shown, sent."""
