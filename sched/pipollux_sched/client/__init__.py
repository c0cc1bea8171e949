"""HTTP client of a running scheduler, on this machine or another one."""
