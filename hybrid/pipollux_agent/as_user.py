"""Switches to another user of the machine, and executes a command.

    python -I -S as_user.py USER FOLDER COMMAND...

A scheduler that runs as root starts a job's processes this way, as the job's user. FOLDER becomes
the working directory, entered as that user. The user may not be able to access the file
PIPOLLUX_RESULT_FILE: it is opened before the switch, and the command inherits the descriptor. The
module is run as a file, without its package, and must import only the standard library.
"""

from __future__ import annotations

import json
import os
import pwd
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress

CANNOT_START = 126
"""Exit status if the command cannot be run as that user."""
_OF_THE_CALLER = ("XDG_", "MAIL", "OLDPWD", "SUDO_")
"""Prefixes of variables that belong to the calling user."""


def main(user: str, folder: str, command: list[str]) -> int:
    """Switch to the user, and execute the command; returns only on failure."""
    host = os.uname().nodename
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return _refuse(
            f"run_as: node {host} has no user {user!r}, as whom the job runs; make this user known "
            "on all nodes"
        )
    try:
        environment = _environment(account)
        _hand_over_output(account)
        os.setgroups(os.getgrouplist(user, account.pw_gid))
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    except OSError as error:
        return _refuse(f"run_as: nothing can be started as user {user!r} on node {host}: {error}")
    try:
        os.chdir(folder)
    except OSError as error:
        return _refuse(
            f"working_dir: user {user!r}, as whom the job runs, cannot enter {folder} on node "
            f"{host} ({error.strerror}); give a folder that this user can enter",
            environment,
        )
    try:
        os.execve(command[0], command, environment)  # noqa: S606  # no shell is wanted
    except OSError as error:
        return _refuse(
            f"run_as: user {user!r} cannot run {command[0]} on node {host} ({error.strerror}); "
            "install Python and Pipollux in folders that all users may read",
            environment,
        )


def _environment(account: pwd.struct_passwd) -> dict[str, str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_CALLER)
    }
    result = environment.get("PIPOLLUX_RESULT_FILE")
    if result:
        handle = os.open(result, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        os.fchown(handle, account.pw_uid, account.pw_gid)
        os.set_inheritable(handle, True)
        environment["PIPOLLUX_RESULT_FILE"] = f"/proc/self/fd/{handle}"
    return {
        **environment,
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "SHELL": account.pw_shell,
    }


def _hand_over_output(account: pwd.struct_passwd) -> None:
    """Make the user the owner of stdout and stderr if they are pipes, to open /dev/stdout."""
    for handle in (1, 2):
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            os.fchown(handle, account.pw_uid, account.pw_gid)


def _refuse(why: str, environment: Mapping[str, str] = os.environ) -> int:
    """Print a reason, and write it to the result file as the agent would."""
    print(why, file=sys.stderr, flush=True)
    result = environment.get("PIPOLLUX_RESULT_FILE")
    if result:
        error = {"message": why, "types": [], "loaded": True}
        with suppress(OSError):
            handle = os.open(result, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"asked": False, "error": error}, file)
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
