"""The paths of the REST interface, by who calls them."""
