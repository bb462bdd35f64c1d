"""Certificates of servers, and the rules of TLS between them.

Each server has its own certificate. A private authority, made for the cluster, signed them all. Both ends of a
connection between servers show their certificates. The listening server's must name the address by which it is
reached; the connecting server's may be any that the authority signed. Versions below TLS 1.3 are refused. Users show
no certificate, but an API key to the endpoint, and may use TLS 1.2.
"""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path

from pyorch.errors import PyorchError
from pyorch.serve.llama_server import keys_in

_RECORD = 1 << 14

# The end that refuses a connection sends the reason in an alert, which a reset of the connection can destroy.
ENDED = "it ended the connection without a reason: it does not trust our certificate, or does not serve"


@dataclass(frozen=True)
class Tls:
    """PEM files of a server.

    Attributes:
        certificate: The certificate that it shows.
        key: The certificate's key, without a password.
        authority: The authority that it trusts.
    """

    certificate: Path
    key: Path
    authority: Path

    def context(self, *, listens: bool, public: bool = False) -> ssl.SSLContext:
        """Returns the context for connections.

        Args:
            listens: Whether others open the connections.
            public: Whether users connect: without a certificate, and perhaps with TLS 1.2.

        Raises:
            PyorchError: A file cannot be used; the message names it.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2 if public else ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_NONE if public else ssl.CERT_REQUIRED
        for what, path in asdict(self).items():
            try:
                path.read_bytes()
            except OSError as error:
                raise PyorchError(f"the {what} {path} cannot be read: {error.strerror}") from None
        try:
            context.load_verify_locations(self.authority)
        except ssl.SSLError:
            raise PyorchError(f"the authority {self.authority} is no certificate in the format PEM") from None
        try:
            context.load_cert_chain(self.certificate, self.key, password=_refused)
        except _HasPassword:
            raise PyorchError(f"the key {self.key} has a password, which a server cannot type: write it without one "
                              "(openssl pkey)") from None
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise PyorchError(f"the key {self.key} is not that of the certificate {self.certificate}") from None
            raise PyorchError(f"the certificate {self.certificate} and the key {self.key} are not both of the format "
                              f"PEM: {reason_of(error)}") from None
        return context

    def check(self, address: str) -> None:
        """Checks the certificate as another server with these files would see it at this address.

        Raises:
            PyorchError: A file cannot be used, the authority did not sign the certificate, or the certificate has
                expired or names another address.
        """
        ends = []
        for listens in (True, False):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            end = self.context(listens=listens).wrap_bio(
                incoming, outgoing, server_side=listens, server_hostname=None if listens else address)
            ends.append((end, incoming, outgoing))
        (server, to_server, from_server), (client, to_client, from_client) = ends
        try:
            for _ in range(2):
                for end in (client, server):
                    _advance(end)
                    to_client.write(from_server.read())
                    to_server.write(from_client.read())
        except ssl.SSLError as error:
            raise PyorchError(f"the certificate {self.certificate} cannot be used for {address}: "
                              f"{reason_of(error)}") from None


def check_keys(path: str) -> None:
    """Checks a file of API keys.

    Raises:
        PyorchError: It has no key, or a key that no request could contain.
    """
    try:
        keys = keys_in(path)
    except OSError as error:
        raise PyorchError(f"the keys {path} cannot be read: {error.strerror}") from None
    if not keys:
        raise PyorchError(f"{path} has no key: write one on each line")
    for number, key in enumerate(keys, 1):
        if not re.fullmatch(r"[!-~]+", key):
            raise PyorchError(f"key {number} of {path} has characters that no request can contain: use letters, digits "
                              "and signs of ASCII, without spaces and Windows line ends")


def reason_of(error: OSError) -> str:
    """Returns the reason of a failed handshake in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError)):
        return ENDED
    if isinstance(error, ssl.SSLError) and error.reason:
        return _REASONS.get(error.reason, error.reason.lower().replace("_", " "))
    if (error.errno or 0) > 0:
        return os.strerror(error.errno)  # asyncio replaces the reason by the address
    return error.strerror or str(error) or type(error).__name__


_REASONS = {
    "WRONG_VERSION_NUMBER": "it does not send TLS",
    "HTTP_REQUEST": "it does not send TLS",
    "UNSUPPORTED_PROTOCOL": "it speaks too old a version of TLS",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust our authority",
    "TLSV1_ALERT_DECRYPT_ERROR": "it does not trust our authority",  # it has another one of the same name
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not trust our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that our certificate has expired",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a certificate",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
}


class _HasPassword(Exception):
    pass


def _refused() -> str:
    raise _HasPassword


def _advance(end: ssl.SSLObject) -> None:
    try:
        end.do_handshake()
        end.read(_RECORD)  # an alert follows the handshake
    except ssl.SSLWantReadError:
        pass
