"""The process of a replica: runs the job's script, and writes the exception that ends it to disk.

    python -u script_main.py SCRIPT ARGS...

The script sees what ``python SCRIPT ARGS...`` would show it: its arguments, its folder first in
``sys.path``, itself as ``__main__``. An exception that ends it is printed as Python prints it,
and also written to the file that TORCHELASTIC_ERROR_FILE names, as torch's ``record`` would; from
there torchrun's agent hands it on to the scheduler. It is run as a file, without the package around
it; it must import nothing but the standard library.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import NoReturn

NO_SCRIPT = 2
"""Exit status where the script cannot be read; Python's own."""
TEXT_LIMIT = 10_000
"""Characters kept of a message, and of a traceback."""


def run(script: str) -> None:
    """Run a script as `__main__`; return, or raise SystemExit, where it would end."""
    try:
        code = load(script)
    except OSError as error:
        keep(error, loaded=False)
        print(f"{sys.executable}: can't open file {script!r}: {error}", file=sys.stderr)
        sys.exit(NO_SCRIPT)
    except (SyntaxError, ValueError) as error:
        keep(error.with_traceback(None), loaded=False)
        fail(error)
    module = ModuleType("__main__")
    module.__file__ = script
    module.__loader__ = SourceFileLoader("__main__", script)
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)  # noqa: S102  # the job's script is what is to be run
    except Exception as error:  # whatever ended the script is recorded
        # Without the frame of this function.
        keep(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next), loaded=True)
        fail(error)


def load(script: str) -> CodeType:
    """Compile a script."""
    with io.open_code(script) as file:
        return compile(file.read(), script, "exec", dont_inherit=True)


def fail(error: BaseException) -> NoReturn:
    """Print an exception as if it were uncaught, and end with Python's status for that."""
    sys.last_value = error  # as Python itself does: what runs at exit may ask how the script ended
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)


def keep(error: BaseException, *, loaded: bool) -> None:
    """Record the exception that ended the script, in the format of torch's error files.

    Args:
        error: the exception.
        loaded: whether the script itself could be read and compiled.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    about = traceback.TracebackException.from_exception(error)
    said = "".join(about.format_exception_only()).strip()
    kept = {
        "message": {
            "message": said[-TEXT_LIMIT:],
            "extraInfo": {
                "py_callstack": "".join(about.format())[-TEXT_LIMIT:],
                "timestamp": str(int(time.time())),
            },
        },
        # Beyond torch's format, for `pipollux_sched.backend.result`.
        "types": [kind.__name__ for kind in type(error).__mro__],
        "loaded": loaded,
    }
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(kept, file)


if __name__ == "__main__":
    del sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    run(sys.argv[0])
