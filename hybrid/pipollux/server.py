"""A server for training by push and pull: ``python -m pipollux.server --help``."""

import sys

from pipollux_hybrid.push_pull.server_main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
