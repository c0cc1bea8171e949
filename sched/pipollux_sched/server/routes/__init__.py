"""Routes of the REST interface, by caller."""
