// TCP connections that never block for longer than the caller allows.

#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace pyorch {

using Clock = std::chrono::steady_clock;

// Owns a file descriptor.
class Socket {
public:
    explicit Socket(int fd = -1) : number(fd) {}
    ~Socket() { close(); }

    Socket(Socket && other) noexcept : number(other.number) { other.number = -1; }
    Socket & operator=(Socket && other) noexcept;

    int  fd() const { return number; }
    bool open() const { return number >= 0; }
    void close();

private:
    int number;
};

// Wakes a polling thread.
class Waker {
public:
    Waker(); // throws Failure
    void wake();
    void drain();
    int  fd() const { return receiver.fd(); }

private:
    Socket receiver, sender;
};

// Both throw Failure: PYORCH_INVALID for an impossible address, PYORCH_IO if the operating system refuses. Port 0: a
// free one.
Socket listen_at(const std::string & address, int port);
int    port_of(const Socket & listening);

// Connects; returns the reason of a failure. waker: to wake it ends the attempt.
std::string connect_to(const std::string & address, int port, int timeout_ms, const Waker & waker, Socket & socket);

// The next connection; not open if none waits. It never blocks.
Socket accept_from(const Socket & listening);

// Sends or receives as much as goes without waiting. -1: the connection has ended, with the reason in errno, or 0 if it
// was closed in order.
int64_t send_some(const Socket & socket, const char * data, uint64_t bytes);
int64_t receive_some(const Socket & socket, char * data, uint64_t bytes);

// Bytes that have arrived and were not received yet.
uint64_t bytes_waiting(const Socket & socket);

} // namespace pyorch
