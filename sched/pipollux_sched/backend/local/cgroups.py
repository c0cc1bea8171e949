"""Control groups of the kernel, which limit the memory of replicas on this machine.

A replica with a `memory_limit` starts in a group made for it below one that this process may use:

* version 1: its own group of the memory hierarchy;
* version 2: its own group, or the one around it, if systemd delegates that (`Delegate=`, and
  `DelegateSubgroup=` for services), if it is the root of a container, or if its user may write to
  it; else, as root, the root of all groups.

A group of version 2 whose children have a controller can have no processes itself, so this process
and the others of such a group move to a child of it first. Elsewhere the supervisor of a replica
checks its memory periodically: see `supervisor.MemoryWatch`.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from pipollux_sched.errors import SchedulerError

_LOG = logging.getLogger(__name__)
_PREFIX = "pipollux-"
_OWN = f"{_PREFIX}scheduler"
"""Name of the child for the processes of a group."""
_DELEGATED = ("user.delegate", "trusted.delegate")
"""Extended attributes with which systemd marks a delegated group."""


class NoGroupsError(SchedulerError):
    """No group with a limit of memory can be created; the text gives the reason."""


@dataclass(frozen=True)
class Hierarchy:
    """A mounted hierarchy of control groups that has, or may have, the memory controller."""

    version: int
    mount: Path
    own: Path
    """The folder of this process's group."""


def memberships(text: str) -> dict[str, str]:
    """Parse `/proc/self/cgroup`: the path of the group by controller, by "" for version 2."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def hierarchies(cgroup: str, mountinfo: str) -> list[Hierarchy]:
    """Return the hierarchies for memory, by the texts of two files in `/proc/self`.

    A mount that does not show this process's group, as in some containers, is left out.
    """
    paths = memberships(cgroup)
    version = 1 if "memory" in paths else 2
    path = PurePosixPath(paths.get("memory" if version == 1 else "", "/.."))
    found = []
    for line in mountinfo.splitlines():
        mounted, _, source = line.partition(" - ")
        root, point = map(_unescaped, mounted.split(" ")[3:5])
        kind, *_, options = source.split(" ")
        if kind != ("cgroup" if version == 1 else "cgroup2"):
            continue
        if version == 1 and "memory" not in options.split(","):
            continue
        if ".." not in path.parts and path.is_relative_to(root):
            found.append(Hierarchy(version, Path(point), Path(point) / path.relative_to(root)))
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


@dataclass(frozen=True)
class MemoryGroups:
    """Creates groups below `base`."""

    version: int
    base: Path

    def named(self, name: str) -> Path:
        """Return the path of a new group."""
        return self.base / f"{_PREFIX}{name}-{secrets.token_hex(4)}"

    def create(self, group: Path, limit: int) -> None:
        """Create a group that may use `limit` bytes, and no swap; OSError: it cannot be."""
        group.mkdir()
        try:
            set_limit(group, self.version, limit)
        except OSError:
            group.rmdir()
            raise


def set_limit(group: Path, version: int, limit: int) -> None:
    """Limit the memory of a group without processes."""
    if version == 2:
        _write(group / "memory.max", limit)
        # Without swap, or before Linux 4.19, one of these does not exist.
        for name, value in (("memory.swap.max", 0), ("memory.oom.group", 1)):
            with suppress(OSError):
                _write(group / name, value)
        return
    _write(group / "memory.limit_in_bytes", limit)
    try:
        _write(group / "memory.memsw.limit_in_bytes", limit)
    except OSError:  # the kernel does not count swap
        _write(group / "memory.swappiness", 0)


def find(proc: Path = Path("/proc/self")) -> MemoryGroups:
    """Return where this process can create groups, or raise `NoGroupsError`; try it."""
    try:
        texts = [(proc / name).read_text(encoding="utf-8") for name in ("cgroup", "mountinfo")]
    except OSError as error:
        raise NoGroupsError(f"{error.filename}: {error.strerror}") from None
    reasons = []
    for hierarchy in hierarchies(*texts):
        for base in bases(hierarchy):
            try:
                return _prepared(MemoryGroups(hierarchy.version, base), hierarchy.own)
            except (OSError, NoGroupsError) as error:
                reasons.append(f"{base}: {getattr(error, 'strerror', None) or error}")
        if not reasons:
            reasons.append(
                f"{hierarchy.own} is not delegated to this process, or is a service without "
                "DelegateSubgroup="
            )
    raise NoGroupsError("; ".join(reasons) or "no hierarchy of control groups is mounted")


def bases(hierarchy: Hierarchy) -> Iterator[Path]:
    """Yield the groups below which this process may create some, the best one first."""
    own, mount = hierarchy.own, hierarchy.mount
    if hierarchy.version == 1:
        yield own
        return
    # systemd cannot restart a service in its group once the children of that have controllers.
    service = own.suffix == ".service"
    # In a container the root of all groups that it sees has a type; the real one has none.
    real_root = not (mount / "cgroup.type").exists()
    if _is_delegated(own) and not service:
        yield own
    elif own != mount and _is_delegated(own.parent):
        yield own.parent
    elif own == mount and not real_root:
        yield own
    elif os.geteuid() == 0:
        if real_root:
            yield mount
    elif os.access(own / "cgroup.subtree_control", os.W_OK) and not service:
        yield own


def _is_delegated(group: Path) -> bool:
    for name in _DELEGATED:
        with suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _prepared(groups: MemoryGroups, own: Path) -> MemoryGroups:
    """Return them after a group was created and removed."""
    if groups.version == 2:
        _enable(groups.base, own)
    group = groups.named("probe")
    groups.create(group, 2**30)
    try:
        kills = "memory.oom_control" if groups.version == 1 else "memory.events"
        if "oom_kill " not in (group / kills).read_text(encoding="ascii"):
            raise NoGroupsError(f"{kills} does not count kills: Linux 4.13 is needed")
    finally:
        group.rmdir()
    return groups


def _enable(base: Path, own: Path) -> None:
    """Enable the memory controller in the children of a group of version 2."""
    if "memory" not in (base / "cgroup.controllers").read_text(encoding="ascii").split():
        raise NoGroupsError("the memory controller is not enabled there")
    control = base / "cgroup.subtree_control"
    if "memory" in control.read_text(encoding="ascii").split():
        return
    if base == own and (base / "cgroup.type").exists():
        (base / _OWN).mkdir(exist_ok=True)
        for process in processes(base):
            with suppress(ProcessLookupError):
                _write(base / _OWN / "cgroup.procs", process)
    _write(control, "+memory")


@cache
def of_this_process() -> MemoryGroups | NoGroupsError:
    """Return where this process can create groups, or why it cannot."""
    try:
        return find()
    except NoGroupsError as error:
        return error


def describe() -> str:
    """Return a sentence that says what enforces limits of memory."""
    groups = of_this_process()
    if isinstance(groups, MemoryGroups):
        return (
            f"memory_limit is enforced by the kernel, in control groups below {groups.base} "
            f"(version {groups.version})."
        )
    return (
        "memory_limit is enforced by checks twice a second, as no control groups can be created "
        f"({groups})."
    )


def create_recorded(name: str, limit: int, record: Path) -> Path | None:
    """Create a group for a replica, after writing its path to `record`; None: it cannot be."""
    groups = of_this_process()
    if isinstance(groups, NoGroupsError):
        return None
    group = groups.named(name)
    try:
        record.write_text(str(group), encoding="utf-8")
        groups.create(group, limit)
    except OSError as error:
        _LOG.warning("%s: memory_limit is enforced by checks twice a second: %s", name, error)
        return None
    return group


def recorded(record: Path) -> Path | None:
    """Return the group of a replica, which an earlier scheduler may have created."""
    try:
        return Path(record.read_text(encoding="utf-8"))
    except OSError:
        return None


def remove_recorded(folder: Path) -> None:
    """Remove the groups whose paths are in the files of an attempt that is over."""
    for record in folder.glob("*.cgroup"):
        group = recorded(record)
        if group is not None and not remove(group):
            _LOG.warning("the control group %s is in use and cannot be removed", group)


def processes(group: Path) -> list[int]:
    """Return the processes of a group, without those of groups below it."""
    try:
        return list(map(int, (group / "cgroup.procs").read_text(encoding="ascii").split()))
    except OSError:
        return []


def remove(group: Path) -> bool:
    """Remove a group, and those below it; return whether it is gone: False while one is in use."""
    below = [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]
    try:
        for folder in below:
            folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(path: Path, value: int | str) -> None:
    # Without O_CREAT, which would hide that a file of the kernel is missing.
    with open(path, "r+", encoding="ascii") as file:
        file.write(str(value))
