"""Quotas, weights, priorities and limits of teams, around any policy: docs/teams.md."""
