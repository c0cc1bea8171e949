"""Becomes another user of the machine, and then runs a command in its place.

    python -I -S as_user.py USER FOLDER COMMAND...

A scheduler that runs as root starts a job's processes so, each job's as the user that it is to run
as. FOLDER is entered as that user. The file that PIPOLLUX_RESULT_FILE names lies where that user
may not go: it is opened before, and the command finds it among its open files. It is run as a file,
without the package around it, and must import nothing but the standard library.
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
"""Exit status where the command cannot be run as that user."""
_OF_THE_CALLER = ("XDG_", "MAIL", "OLDPWD", "SUDO_")
"""Beginnings of variables that name things of the user who calls."""


def main(user: str, folder: str, command: list[str]) -> int:
    """Become the user, and run the command; return only where that fails."""
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
    """Return the environment of the user's processes."""
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
    """Let the user open /dev/stdout and /dev/stderr, where they are pipes."""
    for handle in (1, 2):
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            os.fchown(handle, account.pw_uid, account.pw_gid)


def _refuse(why: str, environment: Mapping[str, str] = os.environ) -> int:
    """Say why, also where the agent would have left how the script ended."""
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
