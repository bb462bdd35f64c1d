"""The process of a tunnel: decrypts connections of other servers or of users, and encrypts to servers, on one thread.

Its argument is the descriptor of a socket of packets. The first packet has the certificates and the longest time for
making a connection. Each other packet has a listening socket and its Way. The process answers READY to the first one,
and later sends a sentence for each failed connection. When the socket closes, the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import ssl
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from pyorch.cluster.tls import ENDED, Tls, reason_of

READY = "ready"
MAX_CONNECTIONS = 256  # opened by others; own connections are limited only by the number of servers
_PAUSE_SECONDS = 0.1  # after a connection that could not be accepted
_PENDING_BYTES = 4 << 20  # for one end; with more the other end is not read

# One buffer for all connections: the data is copied out before the next read. asyncio's own buffers make large
# messages half as slow again.
_buffer = memoryview(bytearray(1 << 18))


@dataclass(frozen=True)
class Way:
    """The destination of connections to a listening socket.

    Attributes:
        secure: They arrive encrypted and are forwarded plain; otherwise the reverse.
        name: The name that the destination's certificate must have.
        address: The destination.
        port: Its port; 0: `address` is a Unix socket.
        public: Whether users connect, without certificates.
    """

    secure: bool
    name: str
    address: str
    port: int
    public: bool = False


class End(asyncio.BufferedProtocol):
    """One end of a connection. Its data is written to the other end, as fast as that accepts it.

    When it closes, the other end closes after it has written its pending data.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.over = asyncio.get_running_loop().create_future()  # the reason of its end; None: no error
        self.heard = False
        self._other: End | None = None
        self._early = b""  # data that arrived before the other end existed

    def join(self, other: End) -> None:
        """Connects both ends."""
        self._other, other._other = other, self
        for one, opposite in ((self, other), (other, self)):
            opposite.transport.write(one._early)
            if one.over.done():
                opposite.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(_PENDING_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = True
        data = bytes(_buffer[:nbytes])
        if self._other is None:
            self._early += data
        else:
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        self._other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set_result(error)
        if self._other is not None:
            self._other.transport.close()


class Handshake:
    """A TLS handshake of one connection.

    If a handshake fails, asyncio closes the connection without sending the alert that has the reason. This class sends
    it, and reads until the other side closes, because a reset would overtake the alert.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context, self._alert = context, b""
        self._socket = socket.socket()

    def of(self, connection: socket.socket) -> Handshake:
        """Returns itself, which asyncio uses instead of an SSL context."""
        self._socket.close()
        self._socket = connection.dup()
        return self

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **options: Any) -> ssl.SSLObject:
        """Makes the SSL object, as asyncio requires of a context."""
        made = self._context.wrap_bio(incoming, outgoing, **options)
        advance = made.do_handshake

        def do_handshake() -> None:
            try:
                advance()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError):
                raise  # asyncio calls again
            except ssl.SSLError:
                self._alert = outgoing.read()
                raise

        made.do_handshake = do_handshake  # type: ignore[method-assign]
        return made

    async def refuse(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await loop.sock_sendall(self._socket, self._alert)
            self._socket.shutdown(socket.SHUT_WR)
            while await loop.sock_recv_into(self._socket, _buffer):
                pass

    def close(self) -> None:
        """Closes the connection; asyncio alone would leave it open."""
        self._socket.close()


class Process:
    """The tunnel, with all ways and connections."""

    def __init__(self, channel: socket.socket, tls: Tls, seconds: float) -> None:
        """Args: seconds: the time for a new connection to prove its identity."""
        self._channel, self._seconds = channel, seconds
        self._server, self._client = tls.context(listens=True), tls.context(listens=False)
        self._public = tls.context(listens=True, public=True)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task] = set()  # the event loop keeps only weak references
        self._n_from_others = 0
        self._loop.add_reader(channel, self._hear)

    def say(self, sentence: str) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(sentence.encode()[:1024], socket.MSG_DONTWAIT)

    def _hear(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
        if not message:
            os._exit(0)  # the owner has died or closed the tunnel
        self._start(self._accept(socket.socket(fileno=descriptors[0]), pickle.loads(message)))

    def _start(self, work: Coroutine) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket, way: Way) -> None:
        listening.setblocking(False)
        while True:
            try:
                connection, peer = await self._loop.sock_accept(listening)
            except OSError:  # such as too many open files
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if way.secure and self._n_from_others == MAX_CONNECTIONS:
                self.say(f"more than {MAX_CONNECTIONS} connections")
                connection.close()
            else:
                self._n_from_others += way.secure
                self._start(self._carry(connection, peer, way))

    async def _carry(self, connection: socket.socket, peer: tuple, way: Way) -> None:
        """Handles a connection from its start to its end."""
        name = "a client at {}:{}".format(*peer[:2]) if way.secure else f"{way.name}:{way.port}"
        ends: list[End] = []
        handshake = Handshake(self._public if way.public else self._server if way.secure else self._client)
        try:
            await asyncio.wait_for(self._connect(connection, way, ends, handshake), self._seconds)
            accepted, reached = ends
            accepted.join(reached)
            if way.public and not accepted.heard:  # otherwise silent users could take all connections
                await asyncio.wait({accepted.over}, timeout=self._seconds)
                if not accepted.heard:
                    raise asyncio.TimeoutError
            error = await (accepted if way.secure else reached).over
            # The accepted end is verified before this. The reached end shows by its first byte that it accepts us.
            if not way.secure and not reached.heard and not accepted.over.done():
                self.say(f"{name}: {reason_of(error) if error is not None else ENDED}")
        except asyncio.TimeoutError:
            self.say(f"{name}: nothing came of the connection in {self._seconds:g} s")
        except (OSError, ValueError) as error:
            self.say(f"{name}: {reason_of(error) if isinstance(error, OSError) else error}")
            if isinstance(error, ssl.SSLError):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(handshake.refuse(), self._seconds)
        finally:
            handshake.close()
            self._n_from_others -= way.secure
            for end in ends:
                end.transport.close()
            if not ends:
                connection.close()

    async def _connect(self, connection: socket.socket, way: Way, ends: list[End], handshake: Handshake) -> None:
        """Appends the accepted end to `ends`, then the reached one."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secured = handshake.of(connection) if way.secure else None
        ends.append((await self._loop.connect_accepted_socket(End, connection, ssl=secured))[1])
        if way.secure:
            reached = (self._loop.create_connection(End, way.address, way.port) if way.port else
                       self._loop.create_unix_connection(End, way.address))
            ends.append((await reached)[1])
        else:
            remote = await self._reach(way)
            ends.append((await self._loop.create_connection(
                End, sock=remote, ssl=handshake.of(remote), server_hostname=way.name))[1])
        handshake.close()

    async def _reach(self, way: Way) -> socket.socket:
        failure = OSError(f"no address of {way.address}")
        for *kind, _, address in await self._loop.getaddrinfo(way.address, way.port, type=socket.SOCK_STREAM):
            reached = socket.socket(*kind)
            reached.setblocking(False)
            try:
                await self._loop.sock_connect(reached, address)
                return reached
            except OSError as error:
                failure = error
                reached.close()
        raise failure


async def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    process = Process(channel, *pickle.loads(channel.recv(1 << 16)))
    process.say(READY)
    await asyncio.get_running_loop().create_future()  # until the owner ends


if __name__ == "__main__":
    asyncio.run(main())
