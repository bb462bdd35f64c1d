"""Which web pages may use a server: decided from the headers Origin and Host, before a request is read further.

A browser sends requests of any page to any address, also to a server on the user's own machine. Origin names the site
of the page. A page can also have its own host name resolve to 127.0.0.1 ("DNS rebinding"): for the browser the server
then belongs to the page's site, and only Host shows the foreign name.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from pyorch.errors import PyorchError, one_line
from pyorch.runtime import fatal
from pyorch.serve import llama_server
from pyorch.serve.llama_server import Flags

ALL = "*"
_LOCALHOST = "localhost"
_PORTS = {"http": 80, "https": 443}
_LONGEST = 300  # characters of a name
_MOST_NOTICES = 8  # a page can send requests under any number of names


class Origins:
    """The rule of one server. See docs/how-to/serve.md."""

    def __init__(self, named: Sequence[str], hosts: Sequence[str]) -> None:
        """Args:
            named: Further origins: https://host[:port], "null", or "*" for all.
            hosts: The addresses on which the server listens.

        Raises:
            PyorchError: A name is no origin.
        """
        named = [name.removesuffix("/") for name in named]
        for name in named:
            if name not in (ALL, "null", _LOCALHOST) and not _is_origin(name):
                raise PyorchError(f'--origins "{name}" is no origin: give https://host[:port], or * for every page')
        self._all = ALL in named
        self._named = {_normal(name) for name in named}
        self._names = {name.lower() for name in hosts} | {urlsplit(name).hostname for name in named if "://" in name}
        self._is_loopback = all(map(_leads_to_loopback, hosts))
        self._noticed: set[str] = set()

    @classmethod
    def of(cls, flags: Flags) -> Origins:
        """Makes the rule that a server's flags say.

        Raises:
            PyorchError: A name is no origin.
        """
        named = (name.strip() for name in flags.value(llama_server.CORS_ORIGINS).split(","))
        return cls([name for name in named if name], flags.value(llama_server.HOST).split(","))

    def refusal(self, headers: Mapping[str, str]) -> str:
        """Returns why a request is refused, "" if it is not. headers: by name in lower case."""
        if self._all:
            return ""
        host, origin = (headers.get(name, "")[:_LONGEST] for name in ("host", "origin"))
        if self._is_loopback and not self._is_known(host):
            return self._refused(f'to the name "{host}"', f"http://{host}")
        if origin and not (_is_own(host, origin) or _normal(origin) in self._named or _is_localhost(origin)):
            return self._refused(f'of pages of "{origin}"', origin)
        return ""

    def _is_known(self, host: str) -> bool:
        """Returns whether no page of another site can have this Host: DNS gives names addresses, not addresses names.

        Browsers always send Host.
        """
        name = _name_of(host)
        return not host or name in self._names or _is_local_name(name) or _address(name) is not None

    def _refused(self, what: str, origin: str) -> str:
        sentence = f"the server refuses requests {what}: its option --origins {origin} allows them"
        if origin not in self._noticed and len(self._noticed) < _MOST_NOTICES:
            self._noticed.add(origin)
            fatal.notice(one_line(sentence))
        return sentence


def is_from_here(headers: Mapping[str, str], is_local: bool) -> bool:
    """Returns whether a program on this machine sent a request, or a page of this server in a browser here.

    Args:
        headers: By name in lower case.
        is_local: Whether the request came over the loopback interface or a Unix socket.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    return is_local and _is_local_name(_name_of(host)) and (origin is None or _is_own(host, origin))


def _is_own(host: str, origin: str) -> bool:
    """Returns whether a page is of the server that has this Host. A proxy in front may speak TLS."""
    return _normal(origin) in {_normal(f"{scheme}://{host}") for scheme in _PORTS}


def _name_of(host: str) -> str:
    """Returns a Host without its port, "" if it is damaged."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_origin(text: str) -> bool:
    try:
        url = urlsplit(text)
        return bool(url.scheme and url.hostname) and text.lower() == f"{url.scheme}://{url.netloc}".lower() and (
            "@" not in text and (url.port is None or url.port > 0))
    except ValueError:
        return False


def _normal(origin: str) -> str:
    """Returns an origin in lower case, without the default port of its scheme."""
    origin = origin.lower()
    scheme, _, rest = origin.partition("://")
    return origin.removesuffix(f":{_PORTS[scheme]}") if scheme in _PORTS and not rest.endswith("]") else origin


def _is_localhost(origin: str) -> bool:
    try:
        url = urlsplit(origin)
        return url.scheme in _PORTS and _is_origin(origin) and _is_local_name(url.hostname or "")
    except ValueError:
        return False


def _is_local_name(name: str) -> bool:
    """Returns whether a browser looks for this name on its own machine only."""
    address = _address(name)
    return name == _LOCALHOST or name.endswith(f".{_LOCALHOST}") or (address is not None and address.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


def _leads_to_loopback(host: str) -> bool:
    """Returns whether a server at this address is reached from its own machine only, through TCP."""
    if host.endswith(".sock"):  # no browser connects to it
        return False
    try:
        found = [info[4][0] for info in socket.getaddrinfo(host, None)]
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(_is_local_name(address) for address in found)
