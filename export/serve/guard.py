"""What all connections share: how many there are, the bytes that are held for them, and whose place a new one takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

HELD = 64 << 20
"""Bytes of requests that are read or answered now, all together."""

SPARE_FILES = 128
"""Files that the process has open beside its connections."""


class Guarded(Protocol):
    """A connection as the guard sees it."""

    held: int
    """Bytes of its requests that are kept."""

    @property
    def stays(self) -> bool:
        """A whole request of it is being answered, so it keeps its place; or it is being closed anyway."""
        ...

    def give_way(self) -> None:
        """Close: the place is needed."""
        ...


class Guard:
    """Counts work, not sockets: connections that only wait or send give way to new ones, the oldest first.

    refused: told the status of each answer that a connection gives by itself.
    """

    def __init__(self, max_connections: int, refused: Callable[[int], None] = lambda status: None):
        self.max_connections = max_connections
        self.refused = refused
        self.held = 0
        self.connections: dict[Guarded, None] = {}  # who has waited for longest is first

    def add(self, connection: Guarded) -> None:
        self.connections[connection] = None
        if len(self.connections) > self.max_connections:  # several at once, as finding them takes as long as one
            waiting = [one for one in self.connections if not one.stays]
            for one in waiting[: max(1, self.max_connections // 16)]:
                one.give_way()

    def waits(self, connection: Guarded) -> None:
        """From now on: it is behind all who wait already."""
        if self.connections.pop(connection, self) is None:
            self.connections[connection] = None

    def remove(self, connection: Guarded) -> None:
        self.connections.pop(connection, None)

    def hold(self, connection: Guarded, size: int) -> None:
        """`size` more bytes are kept for it."""
        connection.held += size
        self.held += size
        if self.held > HELD:
            for one in [one for one in self.connections if one.held and not one.stays]:
                one.give_way()
                if self.held <= HELD * 3 // 4:
                    break

    def release(self, connection: Guarded) -> None:
        self.held -= connection.held
        connection.held = 0


def allow_files(count: int) -> int:
    """Let the process open so many files beside a few of its own, as far as the system permits; how many it may."""
    try:
        import resource
    except ImportError:  # Windows
        return count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return count
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # macOS: an infinite limit is not meant so
        most = soft
    return max(8, most - SPARE_FILES)
