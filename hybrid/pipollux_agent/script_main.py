"""The process of a replica: runs the job's script, and records the exception that ends it.

    python -u script_main.py SCRIPT ARGS...
    python -u script_main.py -m MODULE ARGS...
    python -u script_main.py -c COMMAND ARGS...

A module runs as by ``python -m``, and a command in ``/bin/sh -c``, which replaces this process. The
script's environment is that of ``python SCRIPT ARGS...``: its arguments, its folder first in
``sys.path``, itself as ``__main__``. An exception that ends it is printed as Python prints it, and
also written to the file TORCHELASTIC_ERROR_FILE, as torch's ``record`` would; torchrun's agent
passes it on to the scheduler. The module is run as a file, without its package; it must import only
the standard library.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

NO_SCRIPT = 2
"""Exit status if the script cannot be read; Python's own."""
TEXT_LIMIT = 10_000
"""Maximum length in characters of a message, and of a traceback."""


def run(script: str) -> None:
    """Run a script as `__main__`; return, or raise SystemExit, when it ends."""
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
    execute(code, module)


def run_module(name: str) -> None:
    """Run a module as `__main__`, as ``python -m`` does; return, or raise SystemExit."""
    try:
        spec = find_module(name)
        loader: Any = spec.loader
        code = loader.get_code(spec.name)
    except (ImportError, SyntaxError) as error:
        keep(error, loaded=False)
        fail(error)
    except Exception as error:  # of its package
        keep(error, loaded=True)
        fail(error)
    module = ModuleType("__main__")
    module.__file__ = spec.origin
    module.__loader__ = loader
    module.__spec__ = spec
    module.__package__ = spec.parent
    sys.argv[0] = spec.origin or name
    execute(code, module)


def find_module(name: str) -> ModuleSpec:
    """Return the specification of a module, or of the `__main__` of a package; or ImportError."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec


def run_command(command: str, args: list[str]) -> NoReturn:
    """Become a shell that runs a command, with the folder of this Python first in PATH."""
    own = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join(filter(None, (own, os.environ.get("PATH"))))
    os.execv("/bin/sh", ["/bin/sh", "-c", command, "sh", *args])  # noqa: S606  # as asked


def execute(code: CodeType, module: ModuleType) -> None:
    """Execute code as `__main__`, and record the exception that ends it."""
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)  # noqa: S102  # the job's script
    except Exception as error:  # recorded for the scheduler
        # Without the frame of this function.
        keep(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next), loaded=True)
        fail(error)


def load(script: str) -> CodeType:
    """Compile a script."""
    with io.open_code(script) as file:
        return compile(file.read(), script, "exec", dont_inherit=True)


def fail(error: BaseException) -> NoReturn:
    """Print an exception as if it were uncaught, and exit with Python's status for that."""
    sys.last_value = error  # as Python does, for functions that run at exit
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)


def keep(error: BaseException, *, loaded: bool) -> None:
    """Record the exception that ended the script, in the format of torch's error files.

    `loaded`: the script itself could be read and compiled.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    about = traceback.TracebackException.from_exception(error)
    message = "".join(about.format_exception_only()).strip()
    kept = {
        "message": {
            "message": message[-TEXT_LIMIT:],
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
    if sys.argv[0] == "-c":
        run_command(sys.argv[1], sys.argv[2:])
    if sys.argv[0] == "-m":
        del sys.argv[0]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        run_module(sys.argv[0])
        sys.exit()
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    run(sys.argv[0])
