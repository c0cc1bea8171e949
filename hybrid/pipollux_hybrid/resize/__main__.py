"""Lists the replicas of a job with a rendezvous folder, and makes replicas leave.

python -m pipollux_hybrid.resize FOLDER             lists the replicas
python -m pipollux_hybrid.resize FOLDER leave ID    makes one leave at the next step
"""

from __future__ import annotations

import sys
from pathlib import Path

from .rendezvous_folder import RendezvousFolder

NO_JOB = 1
USAGE = 2
"""Exit statuses."""


def main(arguments: list[str]) -> int:
    """List the replicas of the job with a rendezvous folder, or make one leave."""
    folder, *rest = arguments or ["--help"]
    missing = not folder.startswith("-") and not Path(folder).is_dir()
    if missing:
        why = "there is no such folder; give the PIPOLLUX_RENDEZVOUS of the job"
        print(f"{folder}: {why}\n", file=sys.stderr)
    if missing or folder.startswith("-") or (rest and (rest[0] != "leave" or len(rest) != 2)):
        print(__doc__.strip(), file=sys.stderr)
        return USAGE
    rendezvous = RendezvousFolder(Path(folder))
    announcement = rendezvous.announcement()
    if announcement is None:
        print(f"no job runs in {folder}", file=sys.stderr)
        return NO_JOB
    members = announcement.membership.replicas
    if rest:
        return _leave(rendezvous, members, rest[1])
    for rank, replica in enumerate(members):
        print(f"{replica}  replica {rank}")
    for joining_replica in rendezvous.joining():
        status = "waits to join" if joining_replica.waiting_to_join else "starts"
        print(f"{joining_replica.replica}  {status}, on {joining_replica.host}")
    return 0


def _leave(rendezvous: RendezvousFolder, members: tuple[str, ...], replica: str) -> int:
    if replica not in members or len(members) == 1:
        why = "it is the last one: send it SIGTERM" if replica in members else "no such replica"
        print(f"{replica} cannot leave: {why} (there are {', '.join(members)})", file=sys.stderr)
        return USAGE
    rendezvous.ask_to_leave(replica)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
