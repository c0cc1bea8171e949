"""Notifications about jobs: signed webhooks, and other services through Apprise."""
