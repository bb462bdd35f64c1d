"""The process of a tunnel: takes TLS from other servers and gives TLS to them, on one thread.

Its argument is the descriptor of a socket of packets. The first one says which certificates to use (Tls.to_fields) and
how long a handshake may take, and each other one brings a listening socket and says where its connections are to lead.
It answers READY when it has understood the first, and then with a sentence for each connection that came to nothing.
When the socket ends, so does this process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Callable

from pyorch.cluster.tls import Tls, reason_of

READY = "ready"
MAX_CONNECTIONS = 256  # that others open; those of our own have no bound but the number of servers
LINGER_SECONDS = 1.0  # that what one end still says is carried, or thrown away, when the other has ended
_PLAIN_SECONDS = 3.0  # to reach the engine, which is on this machine
_BUFFER = 1 << 18

# One for all: a thread empties it before it goes on.
_buffer = memoryview(bytearray(_BUFFER))

_PLAIN, _SECURE = range(2)  # the ends of a connection


class End:
    """One of the two ends of a connection, which never block. pending: what it could not take yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.pending = b""
        self.ended = False  # nothing comes any more
        self.closing = False  # nothing follows after what is pending
        self.events = -1  # that it is watched for, once data flows
        self.wants_write = False  # TLS has to write before it can read
        self.broken = False

    def receive(self) -> memoryview:
        """What is there, as much as fits the buffer; sets ended."""
        n = 0
        self.wants_write = False
        try:
            while n < _BUFFER:
                got = self.socket.recv_into(_buffer[n:])
                if got == 0:
                    self.ended = True
                    break
                n += got
                if not isinstance(self.socket, ssl.SSLSocket):
                    break  # a second look would cost more than it finds
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ssl.SSLWantWriteError:
            self.wants_write = True
        except ssl.SSLEOFError:
            self.ended = True
        except OSError:
            self.broken = True
            raise
        return _buffer[:n]

    def send(self, data: memoryview | bytes) -> None:
        """As much as goes; the rest is pending. REQUIRES: nothing is."""
        at = 0
        try:
            while at < len(data):
                at += self.socket.send(data[at:])
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:
            self.broken = True
            raise
        self.pending = bytes(data[at:])

    def flush(self) -> None:
        data, self.pending = self.pending, b""
        self.send(data)

    def end(self) -> None:
        """Says that nothing follows, and goes on receiving: TLS's own word for an end would end both directions."""
        self.closing = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_WR)

    def holds(self) -> bool:
        """Whether something was received that nobody is told of."""
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0


class Connection:
    """From one of the listening sockets to where that leads; of its two ends, one speaks TLS."""

    def __init__(self, process: Process, first: socket.socket, way: Way) -> None:
        self.process, self.way, self.first = process, way, first
        self.deadline: float | None = time.monotonic() + process.handshake_seconds
        self.name = ""
        self.ends: list[End] = []
        self.secure: socket.socket | None = None
        self.plain: socket.socket | None = None
        self.joined = False
        self.heard = (
            way.secure
        )  # who connects was believed before it is carried; who is reached shows by a byte that it does
        self.refused = False

    def begin(self) -> None:
        """With what was accepted, of which either end may be the one with TLS."""
        self.first.setblocking(False)
        try:
            if self.way.secure:
                self.secure = self.first
                self.name = "who connects from {}:{}".format(*self.first.getpeername()[:2])
                self.secure = self.process.server.wrap_socket(self.first, server_side=True,
                                                              do_handshake_on_connect=False)
                self.process.watch(self.secure, selectors.EVENT_READ, self.shake)
            else:
                self.name = f"{self.way.name}:{self.way.port}"
                self.plain = self.first
                self.reach()
        except OSError as error:
            self.fail(error)

    def reach(self) -> None:
        """Begins to connect to another server."""
        family, _, _, _, where = socket.getaddrinfo(self.way.address, self.way.port, type=socket.SOCK_STREAM)[0]
        self.secure = socket.socket(family, socket.SOCK_STREAM)
        self.secure.setblocking(False)
        status = self.secure.connect_ex(where)
        if status not in (0, errno.EINPROGRESS):
            raise OSError(status, os.strerror(status))
        self.process.watch(self.secure, selectors.EVENT_WRITE, self.reached)

    def reached(self, events: int) -> None:
        try:
            status = self.secure.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                raise OSError(status, os.strerror(status))
            self.process.forget(self.secure)
            self.secure = self.process.client.wrap_socket(
                self.secure, server_hostname=self.way.name, do_handshake_on_connect=False)
            self.process.watch(self.secure, selectors.EVENT_WRITE, self.shake)
        except OSError as error:
            self.fail(error)

    def shake(self, events: int) -> None:
        try:
            self.secure.do_handshake()
            if self.way.secure:
                self.plain = socket.create_connection((self.way.address, self.way.port), timeout=_PLAIN_SECONDS)
        except ssl.SSLWantReadError:
            self.process.watch(self.secure, selectors.EVENT_READ, self.shake)
        except ssl.SSLWantWriteError:
            self.process.watch(self.secure, selectors.EVENT_WRITE, self.shake)
        except (OSError, ValueError) as error:
            self.fail(error)
        else:
            self.deadline, self.joined = None, True
            self.ends = [End(self.plain), End(self.secure)]
            for number in range(2):
                if self in self.process.connections:
                    self.on_event(number, selectors.EVENT_READ)  # what came with the handshake

    def carry(self, number: int) -> None:
        """What has come from an end goes to the other."""
        source, target = self.ends[number], self.ends[1 - number]
        while not source.ended and not target.pending:
            data = source.receive()
            self.heard = self.heard or (bool(data) and number == _SECURE)
            if data and not target.closing:
                target.send(data)
            if not source.holds():
                return

    def on_event(self, number: int, events: int) -> None:
        if self.refused:
            return
        end = self.ends[number]
        try:
            if events & selectors.EVENT_WRITE and end.pending:
                end.flush()
                if not end.pending:
                    self.carry(1 - number)
            if events & selectors.EVENT_READ or end.wants_write:
                self.carry(number)
        except OSError as error:
            self.fail(error if isinstance(error, ssl.SSLError) else self.last_word())
            return
        self.settle()

    def last_word(self) -> Exception | None:
        """Of who was reached and broke the connection before it said anything: why, if that is still to be read."""
        if self.heard or not self.ends[_SECURE].broken:
            return None
        try:
            return None if self.ends[_SECURE].receive() else ConnectionResetError()
        except OSError as error:
            return error

    def settle(self) -> None:
        """After something has moved: what is waited for now, and whether it is over."""
        if self.ends[_SECURE].ended and not self.heard and not self.ends[_PLAIN].ended:
            self.fail(ConnectionResetError())
            return
        for end, other in (self.ends, self.ends[::-1]):
            if end.ended and not other.pending and not other.closing:
                other.end()
                self.deadline = self.deadline or time.monotonic() + LINGER_SECONDS
        if all(end.ended for end in self.ends) and not any(end.pending for end in self.ends):
            self.close()
            return
        for number, (end, other) in enumerate((self.ends, self.ends[::-1])):
            events = 0
            if not end.ended and not other.pending:
                events |= selectors.EVENT_READ
            if end.pending or end.wants_write:
                events |= selectors.EVENT_WRITE
            if events != end.events:
                end.events = events
                if events:
                    self.process.watch(end.socket, events, lambda mask, number=number: self.on_event(number, mask))
                else:
                    self.process.forget(end.socket)

    def fail(self, error: Exception | None) -> None:
        """error: that the owner is told of."""
        if error is not None:
            self.process.say(f"{self.name}: {reason_of(error) if isinstance(error, OSError) else error}")
        if isinstance(error, ssl.SSLError) and self.secure is not None and not self.refused:
            # The alert is on its way. If what the other end goes on saying were not read, a reset would overtake that.
            self.refused, self.deadline = True, time.monotonic() + LINGER_SECONDS
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self.secure, socket.SHUT_WR)
                self.process.watch(self.secure, selectors.EVENT_READ, self.throw_away)
                if self.plain is not None:
                    self.process.forget(self.plain)
                    self.plain.close()
                return
        self.close()

    def throw_away(self, events: int) -> None:
        try:
            if not socket.socket.recv_into(self.secure, _buffer):
                self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def close(self) -> None:
        for one in (self.secure, self.plain):
            if one is not None:
                self.process.forget(one)
                one.close()
        self.process.connections.discard(self)


class Way:
    """A listening socket, whose connections lead somewhere. secure: they come with TLS, and go on without. name: that
    the certificate of who is there must bear."""

    def __init__(
        self, process: Process, listening: socket.socket, secure: bool, name: str, address: str, port: int,
    ) -> None:
        self.process, self.listening, self.secure = process, listening, secure
        self.name, self.address, self.port = name, address, port
        listening.setblocking(False)
        process.watch(listening, selectors.EVENT_READ, self.accept)

    def accept(self, events: int) -> None:
        try:
            connection, _ = self.listening.accept()
        except OSError:
            return
        if self.secure and sum(one.way.secure for one in self.process.connections) >= MAX_CONNECTIONS:
            self.process.say(f"more than {MAX_CONNECTIONS} connections")
            connection.close()
            return
        accepted = Connection(self.process, connection, self)
        self.process.connections.add(accepted)
        accepted.begin()


class Process:
    """All ways and connections, and who watches their sockets."""

    def __init__(self, channel: socket.socket, tls: Tls, handshake_seconds: float) -> None:
        """handshake_seconds: from the beginning of a connection, in which who connects must have said who it is."""
        self.channel, self.handshake_seconds = channel, handshake_seconds
        self.server, self.client = tls.context(listens=True), tls.context(listens=False)
        self.connections: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._ways: list[Way] = []
        self.watch(channel, selectors.EVENT_READ, self.hear)

    def watch(self, one: socket.socket, events: int, call: Callable[[int], None]) -> None:
        try:
            self._selector.modify(one, events, call)
        except KeyError:
            self._selector.register(one, events, call)

    def forget(self, one: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(one)

    def say(self, sentence: str) -> None:
        with contextlib.suppress(OSError):
            self.channel.send(sentence.encode()[:1024], socket.MSG_DONTWAIT)

    def hear(self, events: int) -> None:
        message, descriptors, _, _ = socket.recv_fds(self.channel, 1 << 16, 1)
        if not message:
            os._exit(0)  # the owner is gone, or wants no tunnel any more
        self._ways.append(Way(self, socket.socket(fileno=descriptors[0]), **json.loads(message)))

    def run(self) -> None:
        while True:
            deadlines = [connection.deadline for connection in self.connections if connection.deadline is not None]
            wait = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, events in self._selector.select(wait):
                if self._selector.get_map().get(key.fd) is key:  # nothing that came before has changed it
                    key.data(events)
            now = time.monotonic()
            for connection in [one for one in self.connections if one.deadline is not None and one.deadline <= now]:
                if not connection.joined and not connection.refused:
                    self.say(f"{connection.name}: nothing came of the connection in {self.handshake_seconds:g} s")
                connection.close()


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    fields = json.loads(channel.recv(1 << 16))
    process = Process(channel, Tls.of(fields["tls"]), fields["handshake_seconds"])
    process.say(READY)
    process.run()


if __name__ == "__main__":
    main()
