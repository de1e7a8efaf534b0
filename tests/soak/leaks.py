"""What a process, and the machine, hold at a quiet moment, and whether it has become more than it may."""

from dataclasses import dataclass, field

OWN = ("Renderer", "Scheduler", "RankActor", "Proxy", "Controller", "serve run")
"""Processes that run this application's code; the others are Ray's, which remembers every actor that ever was."""
OWN_MB = 32.0
RAYS_MB = 96.0
"""Growth of a process's own memory that is no leak: heaps that fill up to their working size."""
FILES = 16
"""Connections to the other processes, which Ray opens when they are first needed."""
RAYS_LOG_FILES = 200
"""Ray's log monitor leaves the logs of processes that ended open until it holds so many, and then closes them all
(`LOG_MONITOR_MAX_OPEN_FILES`): two for each rank that was killed or ended with it."""
THREADS = 8
SERVES_BYTES = 65_536
"""By which Serve's objects may differ: the built application, what its replicas say of themselves. The pixels of the
smallest image are 98,304 bytes."""


@dataclass(frozen=True)
class Holding:
    """Of one process, or of several that have one name, added up."""

    memory_mb: float
    """Its own: what it shares with others is not counted."""
    files: int
    threads: int


@dataclass(frozen=True)
class Quiet:
    """All that is held while nobody asks anything and the caches are empty."""

    processes: dict[str, Holding]
    object_store_bytes: float
    shared_memory: int
    """Segments of the ranks' collectives."""
    folders: int
    """In the application's temporary folder."""
    gauges: dict[str, float] = field(default_factory=dict)


def leaks(first: Quiet, last: Quiet) -> list[str]:
    """What `last` holds beyond `first`, one line each."""
    found = []
    for name, holding in last.processes.items():
        before = first.processes.get(name)
        if before is None:
            continue
        allowed = OWN_MB if name in OWN else RAYS_MB
        files = RAYS_LOG_FILES if name == "log monitor" else FILES
        for what, grew, limit, unit in (
            ("memory", holding.memory_mb - before.memory_mb, allowed, " MB"),
            ("open files", holding.files - before.files, files, ""),
            ("threads", holding.threads - before.threads, THREADS, ""),
        ):
            if grew > limit:
                found.append(f"{name}: {what} grew by {grew:.0f}{unit}, more than {limit:.0f}{unit}")
    for name in OWN:
        if name in first.processes and name not in last.processes:
            found.append(f"{name}: it is gone")
    if last.object_store_bytes - first.object_store_bytes > SERVES_BYTES:
        found.append(
            f"object store: {first.object_store_bytes:,.0f} bytes before, {last.object_store_bytes:,.0f} after"
        )
    for what, before_value, value in (
        ("segments in /dev/shm", first.shared_memory, last.shared_memory),
        ("temporary folders", first.folders, last.folders),
        *((name, first.gauges[name], value) for name, value in last.gauges.items()),
    ):
        if value != before_value:
            found.append(f"{what}: {before_value:g} before, {value:g} after")
    return found
