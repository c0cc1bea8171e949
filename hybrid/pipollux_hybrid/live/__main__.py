"""Shows who takes part in a job that meets in a folder, and has replicas leave.

python -m pipollux_hybrid.live FOLDER             lists the replicas
python -m pipollux_hybrid.live FOLDER leave ID    has one leave at the next step
"""

from __future__ import annotations

import sys
from pathlib import Path

from .meeting_folder import MeetingFolder

NO_JOB = 1
USAGE = 2
"""Exit statuses."""


def main(arguments: list[str]) -> int:
    """List the replicas of the job that meets in a folder, or have one leave."""
    folder, *rest = arguments or [""]
    if not Path(folder).is_dir() or (rest and (rest[0] != "leave" or len(rest) != 2)):
        print(__doc__.strip(), file=sys.stderr)
        return USAGE
    rendezvous = MeetingFolder(Path(folder))
    bulletin = rendezvous.bulletin()
    if bulletin is None:
        print(f"no job meets in {folder}", file=sys.stderr)
        return NO_JOB
    members = bulletin.membership.replicas
    if rest:
        return _leave(rendezvous, members, rest[1])
    for rank, replica in enumerate(members):
        print(f"{replica}  replica {rank}")
    for newcomer in rendezvous.newcomers():
        what = "waits to join" if newcomer.parked else "starts"
        print(f"{newcomer.replica}  {what}, on {newcomer.host}")
    return 0


def _leave(rendezvous: MeetingFolder, members: tuple[str, ...], replica: str) -> int:
    if replica not in members or len(members) == 1:
        why = "it is the last one: send it SIGTERM" if replica in members else "no such replica"
        print(f"{replica} cannot leave: {why} (there are {', '.join(members)})", file=sys.stderr)
        return USAGE
    rendezvous.ask_to_leave(replica)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
