"""The policy of Sia, for mixed GPU types."""
