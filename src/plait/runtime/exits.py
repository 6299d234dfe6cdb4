"""How a process of this host ended, as seen by a process that is not its parent.

Only a parent may wait for a process, but Linux tells others too, for a while:

    still a zombie    /proc/PID/stat ends with the wait status (proc(5), `exit_code`)
    already reaped    a pidfd opened while the process lived answers PIDFD_GET_INFO (Linux 6.15)

A process that is stopped can tell nobody. This file is also a script, of the standard library alone, that runs
beside a process and writes into its connections when it stays stopped: see `lookout`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

# linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info of 64 bytes), its mask bit for the exit status
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("QQ11Ii")  # mask, cgroup, 11 ids, exit_code: 64 bytes
_TICK = 0.02  # seconds between looks


@dataclass
class Neighbour:
    """A process of this host that may end; make it while the process lives."""

    pid: int
    _fd: int | None = field(default=None, repr=False)
    _stopped: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._fd = os.pidfd_open(self.pid)

    def status(self, patience: float) -> int | None:
        """The wait status, looked for during `patience` seconds; None where it cannot be known."""
        end = time.monotonic() + patience
        while True:
            status = _zombie_status(self.pid)
            if status is None and self._fd is not None:
                status = _reaped_status(self._fd)
            if status is not None or time.monotonic() > end or not _state(self.pid):
                return status
            time.sleep(_TICK)

    def stopped(self) -> int:
        """How many calls of this have, one after the other, found it stopped; by a debugger does not count."""
        self._stopped = self._stopped + 1 if _state(self.pid)[:1] == ["T"] else 0
        return self._stopped

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lookout(words: str, connections: Sequence[int], every: float, looks: int) -> subprocess.Popen[bytes] | None:
    """A process that says `words` down these sockets once so many looks have found this one stopped.

    It ends with this one, whose end the sockets then show. In a session of its own: what a terminal stops it is not.
    None where there can be none.
    """
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, (os.getpid(), words, every, looks, *connections))],
            pass_fds=connections, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return None


def _look_out(pid: int, words: str, every: float, looks: int, connections: Sequence[int]) -> None:
    neighbour = Neighbour(pid)
    while neighbour._fd is not None and not select.select([neighbour._fd], [], [], every)[0]:
        if neighbour.stopped() == looks:
            for connection in connections:
                with contextlib.suppress(OSError):
                    os.write(connection, f"\n{words}\n".encode())  # it may have been stopped within a line


def describe(status: int) -> str:
    """A wait status in words: `killed by SIGKILL`, `ended with exit code 1`."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _state(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _zombie_status(pid: int) -> int | None:
    fields = _state(pid)
    return int(fields[-1]) if fields and fields[0] == "Z" else None


def _reaped_status(fd: int) -> int | None:
    request = _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13)
    try:
        answer = _PIDFD_INFO.unpack(fcntl.ioctl(fd, _PIDFD_GET_INFO, request))
    except OSError:
        return None
    mask, exit_code = answer[0], answer[13]
    return int(exit_code) if mask & _PIDFD_INFO_EXIT else None


if __name__ == "__main__":
    _pid, _words, _every, _looks, *_connections = sys.argv[1:]
    _look_out(int(_pid), _words, float(_every), int(_looks), [int(c) for c in _connections])
