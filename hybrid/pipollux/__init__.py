"""Pipollux in a training script: the names of `pipollux_hybrid` under the project's own.

Example::

    import pipollux

    pipollux.init_process_group()
"""

from pipollux_hybrid import *  # noqa: F403  # the names in `__all__`, and no others
from pipollux_hybrid import __all__ as __all__
