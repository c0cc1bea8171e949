"""Actions on jobs: commands, the executor, admission, heartbeats, the watchdog."""
