#include "cluster/socket.h"

#include "base/status.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

namespace pyorch {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses addresses_of(const std::string & address, int port, int flags) {
    addrinfo hints    = {};
    hints.ai_family   = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags    = flags;
    addrinfo * found  = nullptr;
    if (port < 0 || port > 65535) {
        throw Failure(PYORCH_INVALID, format("%d is no port: 0 to 65535 are", port));
    }
    const int status = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (status != 0) {
        throw Failure(PYORCH_INVALID, format("%s is no address: %s", address.c_str(), gai_strerror(status)));
    }
    return Addresses(found, freeaddrinfo);
}

void prepare(const Socket & socket) {
    fcntl(socket.fd(), F_SETFL, fcntl(socket.fd(), F_GETFL) | O_NONBLOCK);
    fcntl(socket.fd(), F_SETFD, FD_CLOEXEC);
    const int on = 1;
    setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

} // namespace

Socket & Socket::operator=(Socket && other) noexcept {
    std::swap(number, other.number);
    return *this;
}

void Socket::close() {
    if (number >= 0) {
        ::close(number);
        number = -1;
    }
}

Waker::Waker() {
    int ends[2];
    if (pipe(ends) != 0) {
        throw Failure(PYORCH_IO, format("cannot make a pipe: %s", strerror(errno)));
    }
    receiver = Socket(ends[0]);
    sender   = Socket(ends[1]);
    for (int end : ends) {
        fcntl(end, F_SETFL, O_NONBLOCK);
        fcntl(end, F_SETFD, FD_CLOEXEC);
    }
}

void Waker::wake() {
    const char    one     = 1;
    const ssize_t ignored = write(sender.fd(), &one, 1); // full: it is awake
    (void) ignored;
}

void Waker::drain() {
    char bytes[64];
    while (read(receiver.fd(), bytes, sizeof(bytes)) > 0) {
    }
}

Socket listen_at(const std::string & address, int port) {
    const Addresses found = addresses_of(address, port, AI_PASSIVE);
    Socket          socket(::socket(found->ai_family, SOCK_STREAM, 0));
    const int       on = 1;
    if (socket.open()) {
        setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        prepare(socket);
    }
    if (!socket.open() || bind(socket.fd(), found->ai_addr, found->ai_addrlen) != 0 || listen(socket.fd(), 64) != 0) {
        throw Failure(PYORCH_IO, format("cannot listen at %s:%d: %s", address.c_str(), port, strerror(errno)));
    }
    return socket;
}

int port_of(const Socket & listening) {
    sockaddr_storage name = {};
    socklen_t        size = sizeof(name);
    getsockname(listening.fd(), (sockaddr *) &name, &size);
    return ntohs(name.ss_family == AF_INET6 ? ((sockaddr_in6 &) name).sin6_port : ((sockaddr_in &) name).sin_port);
}

std::string connect_to(const std::string & address, int port, int timeout_ms, const Waker & waker, Socket & socket) {
    const Addresses found = addresses_of(address, port, 0);
    socket                = Socket(::socket(found->ai_family, SOCK_STREAM, 0));
    if (!socket.open()) {
        return strerror(errno);
    }
    prepare(socket);
    if (connect(socket.fd(), found->ai_addr, found->ai_addrlen) == 0) {
        return "";
    }
    if (errno != EINPROGRESS) {
        return strerror(errno);
    }
    pollfd fds[] = { { socket.fd(), POLLOUT, 0 }, { waker.fd(), POLLIN, 0 } };
    if (poll(fds, 2, timeout_ms) <= 0 || !fds[0].revents) {
        return fds[1].revents ? "nobody waits for it" : format("no answer in %d ms", timeout_ms);
    }
    int       error = 0;
    socklen_t size  = sizeof(error);
    getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    return error ? strerror(error) : "";
}

Socket accept_from(const Socket & listening) {
    Socket socket(accept(listening.fd(), nullptr, nullptr));
    if (socket.open()) {
        prepare(socket);
    }
    return socket;
}

int64_t send_some(const Socket & socket, const char * data, uint64_t bytes) {
    const ssize_t n = send(socket.fd(), data, bytes, MSG_NOSIGNAL);
    return n >= 0 ? n : errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

int64_t receive_some(const Socket & socket, char * data, uint64_t bytes) {
    errno           = 0;
    const ssize_t n = recv(socket.fd(), data, bytes, 0);
    return n > 0 ? n : n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? 0 : -1;
}

uint64_t bytes_waiting(const Socket & socket) {
    int n = 0;
    return ioctl(socket.fd(), FIONREAD, &n) == 0 ? (uint64_t) n : 0;
}

} // namespace pyorch
