"""What would be decided, and why: plans and explanations, without acting."""
