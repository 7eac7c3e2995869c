"""Memory of a session's processes, as Linux counts it."""

from pathlib import Path

_KIB_PER_MIB = 1024


def session_rss_mib(leader: int) -> float:
    """Resident memory of all processes of a session, what they share counted by each.

    Args:
        leader: Process id of the session's leader.
    """
    total_kib = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; behind it: state, parent,
            # group, session.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                total_kib += _rss_kib(stat.with_name("status").read_text())
        except (OSError, IndexError, ValueError):  # it has just ended
            continue
    return total_kib / _KIB_PER_MIB


def _rss_kib(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0
