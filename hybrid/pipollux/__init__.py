"""The public API of Pipollux for training scripts, re-exported from `pipollux_hybrid`.

Example::

    import pipollux

    pipollux.init_process_group()
"""

from pipollux_hybrid import *  # noqa: F403  # the names in `__all__`, and no others
from pipollux_hybrid import __all__ as __all__
