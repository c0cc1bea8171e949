"""Becomes another user of the machine, and then runs a command in its place.

    python -I -S as_user.py USER FOLDER COMMAND...

A scheduler that runs as root starts a job's processes so, each job's as the user that it is to run
as. FOLDER is entered as that user. The file that PIPOLLUX_RESULT_FILE names lies where that user
may not go: it is opened before, and the command finds it among its open files. It is run as a file,
without the package around it, and must import nothing but the standard library.
"""

from __future__ import annotations

import os
import pwd
import sys

CANNOT_START = 126
"""Exit status where the command cannot be run as that user."""
_OF_THE_CALLER = ("XDG_", "MAIL", "OLDPWD", "SUDO_")
"""Beginnings of variables that name things of the user who calls."""


def main(user: str, folder: str, command: list[str]) -> int:
    """Become the user, and run the command; return only where that fails."""
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return _refuse(f"{os.uname().nodename} has no user {user!r}, as which the job is to run")
    try:
        environment = _environment(account)
        os.setgroups(os.getgrouplist(user, account.pw_gid))
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
        os.chdir(folder)
        os.execve(command[0], command, environment)  # noqa: S606  # no shell is wanted
    except OSError as error:
        return _refuse(f"user {user!r} cannot run the job: {error}")


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


def _refuse(why: str) -> int:
    print(why, file=sys.stderr, flush=True)
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
