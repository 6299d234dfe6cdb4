"""The side channel between the ranks of a group: a star of TCP connections around rank 0.

It shares nothing with the process group, so it works while every collective hangs. A thread of each
rank reads its connections and sleeps in between. A process that dies closes its connection, however it dies, and
the kernel's keepalive closes the one to a host that vanished; one that is stopped does neither, so the ranks of
its host look for that every few seconds, and where others live elsewhere a small process beside the first of them:

    {"say": "hello", "rank": 1, "token": ...}        a member to the hub, first of all
    {"say": "welcome", "rank": 0}                    the hub's answer, when all have come
    {"say": "come", "rank": 1, "round": 7, "what": "save", "value": ..., "passes": 3}    to a meeting, after 3
                                                     backward passes
    {"say": "failed", "rank": 1, "text": "ValueError: ..."}
    {"say": "stumbled", "rank": 1, "at": "...", "text": ...}    an error that all ranks may have met
    {"say": "left", "rank": 1, "ending": true}       goodbye, by a process that ends or one that goes on
    {"say": "gone", "rank": 1}                       its process is over, without a fault

The hub passes on what it hears. The first failure heard is the one that everybody names, since the
others follow from it. The hub also decides about stumbles: where all ranks say the same within `STUMBLE`
seconds, nobody waits for anybody and nothing has failed; else the first to stumble has.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plait.errors import RankError
from plait.runtime.exits import Neighbour, describe, lookout

Message = dict[str, Any]
CONNECT = 30.0  # seconds for all to connect
SEND = 5.0  # seconds that a peer which does not read may hold up a sender
ENDING = 10.0  # seconds for a process that said goodbye to be over
STUMBLE = 2.0  # seconds for every rank to meet the error that one has met
OBITUARY = 1.0  # seconds to look for the reason of a death
LOOK = 5.0  # seconds between two looks at the processes of this host
STOPPED = 4  # looks, one after the other, at a process that was stopped in each: then its rank has failed


@dataclass(frozen=True)
class Member:
    """Where a rank lives. Equal places see each other's processes and loopback network."""

    rank: int
    host: str
    pid: int
    place: str

    @classmethod
    def me(cls, rank: int) -> Member:
        host = socket.gethostname()
        return cls(rank, host, os.getpid(), " ".join([host, *map(_identity, _PLACE)]))


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong, in words that begin with the rank."""

    rank: int
    text: str


class Line:
    """One rank's end of the channel. Make it with `open_hub` or `open_member`, then `start`."""

    def __init__(self, members: tuple[Member, ...], rank: int) -> None:
        self.members, self.rank = members, rank
        self.on_failure: Callable[[Failure], None] = lambda failure: None
        self.on_come: Callable[[], None] = lambda: None
        self.changed = threading.Condition()
        self.failure: Failure | None = None
        self.left: set[int] = set()
        self.ending: set[int] = set()
        self.gone: set[int] = set()  # of these, whose process is over without a fault
        self.rounds: dict[int, dict[int, Message]] = {}
        self._stumbles: dict[str, dict[int, Message]] = {}  # the hub's, by place
        self._peers: dict[socket.socket, int] = {}
        self._sending = threading.Lock()
        self._closed = False
        here = members[rank].place
        self._neighbours = {
            m.rank: Neighbour(m.pid) for m in members if m.place == here and m.rank != rank
        }
        self._lookout: subprocess.Popen[bytes] | None = None
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._read_all, daemon=True, name="plait-watch")

    @property
    def is_hub(self) -> bool:
        return self.rank == 0

    def add(self, peer: socket.socket, rank: int) -> None:
        _keep_alive(peer)
        self._peers[peer] = rank

    def start(self) -> None:
        here = {self.rank, *self._neighbours}
        if len(here) < len(self.members) and self.rank == min(here):
            words = json.dumps({"say": "failed", "rank": self.rank, "text": self._stopped(self.rank)})
            ends = [end.fileno() for end in (*self._peers, self._waker)]  # its own, too: it may go on
            self._lookout = lookout(words, ends, LOOK, STOPPED)
        self._thread.start()

    def say(self, kind: str, /, **message: Any) -> None:
        """Tell everybody, this rank included."""
        self._hear({"say": kind, "rank": self.rank, **message})

    def close(self, ending: bool = False) -> None:
        """Say goodbye and let go of the connections. Safe to call twice, and at exit.

        A process that is `ending` leaves its connections to the kernel, which closes them when its
        exit status is known.
        """
        if self._closed:
            return
        self._closed = True
        self.say("left", ending=ending)
        if self._lookout is not None:
            self._lookout.kill()
            self._lookout.wait()
        self._waker.close()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(SEND)
        if not ending:
            for each in (*self._peers, self._woken):
                each.close()
        for neighbour in self._neighbours.values():
            neighbour.close()

    # --- hearing and passing on -------------------------------------------------------------

    def _hear(self, message: Message, source: socket.socket | None = None) -> None:
        self._pass_on(message, source)
        if self.is_hub:
            self._weigh(message)
        failure = None
        with self.changed:
            if message["say"] == "failed" and self.failure is None:
                failure = self.failure = Failure(message["rank"], message["text"])
            elif message["say"] == "left":
                self.left.add(message["rank"])
                if message["ending"]:
                    self.ending.add(message["rank"])
            elif message["say"] == "gone":
                self.gone.add(message["rank"])
            elif message["say"] == "come":
                self.rounds.setdefault(message["round"], {})[message["rank"]] = message
            self.changed.notify_all()
        if failure is not None:
            self.on_failure(failure)
        if message["say"] == "come" and message["rank"] != self.rank:
            self.on_come()

    def _weigh(self, message: Message) -> None:
        """The hub's view of stumbles; a rank that ends after one has failed by it."""
        rank, told = message["rank"], None
        with self.changed:
            if message["say"] == "stumbled":
                here = self._stumbles.setdefault(message["at"], {})
                here[rank] = message
                if len(here) == len(self.members):
                    del self._stumbles[message["at"]]
                elif len(here) == 1:
                    late = threading.Timer(STUMBLE, self._overdue, (message,))
                    late.daemon = True
                    late.start()
            elif message["say"] in ("left", "gone"):
                told = next((s[rank] for s in self._stumbles.values() if rank in s), None)
        if told is not None:
            self._overdue(told)

    def _overdue(self, stumble: Message) -> None:
        with self.changed:
            late = self._stumbles.pop(stumble["at"], {})
        if stumble in late.values() and not self._closed:
            self._hear({"say": "failed", "rank": stumble["rank"], "text": stumble["text"]})

    def _pass_on(self, message: Message, source: socket.socket | None) -> None:
        """The hub tells all members but the source; a member tells the hub what it says itself."""
        if source is not None and not self.is_hub:
            return
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            for peer in list(self._peers):
                if peer is not source:
                    _send(peer, data)

    # --- the reading thread -----------------------------------------------------------------

    def _read_all(self) -> None:
        buffers: dict[socket.socket, bytes] = dict.fromkeys((*self._peers, self._woken), b"")
        look = time.monotonic() + LOOK
        with selectors.DefaultSelector() as selector:
            for each in (*self._peers, self._woken):
                selector.register(each, selectors.EVENT_READ)
            while not self._closed:
                if self._neighbours and time.monotonic() >= look:
                    self._look_around()
                    look = time.monotonic() + LOOK
                for key, _ in selector.select(max(0.0, look - time.monotonic()) if self._neighbours else None):
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    data = _receive(peer)
                    if peer is self._woken and not data:
                        return
                    *lines, buffers[peer] = (buffers[peer] + data).split(b"\n")
                    for message in map(_message, lines):
                        if message is not None:
                            self._hear(message, peer)
                    if not data:
                        selector.unregister(peer)
                        self._lost(self._peers[peer])

    def _look_around(self) -> None:
        """A process that stays stopped has failed: all would wait for it until somebody sends it a SIGCONT."""
        for rank, neighbour in self._neighbours.items():
            if neighbour.stopped() == STOPPED and rank not in self.left:
                self._hear({"say": "failed", "rank": rank, "text": self._stopped(rank)})

    def _stopped(self, rank: int) -> str:
        how = f"was stopped (SIGSTOP, or a terminal's Ctrl-Z) for {(STOPPED - 1) * LOOK:g} s and more"
        return self.name(rank, how)

    def _lost(self, rank: int) -> None:
        """The connection to `rank` is closed: after a goodbye, or because its process ended."""
        goodbye = rank in self.left
        if goodbye and rank not in self.ending:
            return
        neighbour = self._neighbours.get(rank)
        patience = ENDING if goodbye else OBITUARY
        status = neighbour.status(patience) if neighbour else None
        if status == 0 or (goodbye and status is None):
            if not goodbye:
                self._hear({"say": "left", "rank": rank, "ending": True})
            self._hear({"say": "gone", "rank": rank})
            return
        how = (
            describe(status)
            if status is not None
            else "died without a word: killed by a signal (as the out-of-memory killer's SIGKILL)"
            " or crashed, or its host is gone"
        )
        self._hear({"say": "failed", "rank": rank, "text": self.name(rank, how)})

    def name(self, rank: int, what: str) -> str:
        member = self.members[rank]
        return f"rank {rank} {what} (process {member.pid} on {member.host})"


# --- connecting -----------------------------------------------------------------------------


@dataclass
class Door:
    """The hub's listening socket, open before the members are told its address."""

    local: bool  # every member lives on this host
    token: str
    socket: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1" if self.local else "", 0), backlog=1024)

    def addresses(self, reach: str | None) -> list[tuple[str, int]]:
        """Where members may find the hub, likeliest first; they all reach host `reach`."""
        port = self.socket.getsockname()[1]
        if self.local:
            return [("127.0.0.1", port)]
        hosts = [_outward(reach)] if reach else []
        return [(host, port) for host in [*hosts, socket.gethostname()] if host]


def open_hub(members: tuple[Member, ...], door: Door) -> Line:
    """Wait at the door for every member."""
    line = Line(members, 0)
    missing = {m.rank for m in members[1:]}
    end = time.monotonic() + CONNECT
    while missing:
        try:
            door.socket.settimeout(max(0.01, end - time.monotonic()))
            peer, _ = door.socket.accept()
            peer.settimeout(SEND)
            hello = json.loads(_line(peer))
        except TimeoutError:
            text = f"ranks {sorted(missing)} did not connect to rank 0 within {CONNECT:.0f} s"
            line.say("failed", text=text)
            raise RankError(text) from None
        except (OSError, ValueError):
            continue
        if hello.get("token") != door.token or hello.get("rank") not in missing:
            peer.close()
            continue
        missing.remove(hello["rank"])
        line.add(peer, hello["rank"])
    door.socket.close()
    line.say("welcome")
    return line


def open_member(
    members: tuple[Member, ...], rank: int, addresses: list[tuple[str, int]], token: str
) -> Line:
    """Connect to the hub at the first of its addresses that answers."""
    line = Line(members, rank)
    for address in addresses:
        with contextlib.suppress(OSError):
            peer = socket.create_connection(
                (address[0], address[1]), timeout=CONNECT / len(addresses)
            )
            hello = {"say": "hello", "rank": rank, "token": token}
            peer.sendall(json.dumps(hello).encode() + b"\n")
            line.add(peer, 0)
            break
    else:
        tried = ", ".join(f"{host}:{port}" for host, port in addresses)
        raise RankError(f"rank {rank} does not reach rank 0 at {tried}")
    peer.settimeout(2 * CONNECT)
    answer = json.loads(_line(peer))
    peer.settimeout(SEND)
    if answer["say"] == "failed":
        raise RankError(answer["text"])
    return line


def _line(peer: socket.socket) -> bytes:
    """The first line of a connection, and not a byte of the next."""
    data = b""
    while not data.endswith(b"\n"):
        byte = peer.recv(1)
        if not byte:
            raise ValueError("the connection closed before its first line")
        data += byte
    return data


def _send(peer: socket.socket, data: bytes) -> None:
    """Whoever reads sees the closed connection, also where it is closed since a peer took no more of a message."""
    with contextlib.suppress(OSError):
        try:
            peer.sendall(data)
        except OSError:
            peer.shutdown(socket.SHUT_RDWR)


def _message(line: bytes) -> Message | None:
    """None of a line that its process did not write to its end before it was stopped."""
    with contextlib.suppress(ValueError):
        return json.loads(line)  # type: ignore[no-any-return]
    return None


def _receive(peer: socket.socket) -> bytes:
    try:
        return peer.recv(65536)
    except OSError:
        return b""


def _identity(path: str) -> str:
    try:
        return os.readlink(path) if os.path.islink(path) else open(path).read().strip()
    except OSError:
        return ""


def _outward(reach: str) -> str | None:
    """This host's address on the way to `reach`; no packet is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((reach, 9))
        return str(probe.getsockname()[0])
    return None


def _keep_alive(peer: socket.socket) -> None:
    """A peer whose host is gone is found in 20 s by the kernel, whatever this process is doing."""
    peer.settimeout(SEND)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


_KEEPALIVE = {  # tcp(7); milliseconds for the last, seconds for the others
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,
}

# Processes with the same of these share process ids and the loopback network.
_PLACE = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/net")
