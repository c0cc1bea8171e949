"""The NVIDIA GPUs of this machine: which there are, which may be used, and how they are."""
