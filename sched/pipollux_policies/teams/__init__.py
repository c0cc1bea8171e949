"""Quotas, weights, priorities and limits of teams, around any policy: docs/howto/teams.md."""
