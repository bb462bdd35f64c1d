"""Who servers are to each other: certificates, and what TLS demands of them.

Each server has a certificate of its own, and all have that of one authority, which signed them: a private one, made for
the cluster. Both ends of a connection between servers show theirs. Who is asked must have one that names the address by
which it is reached; who asks, any that the authority signed. Versions below TLS 1.3 are not spoken. Users show no
certificate, but a key to the endpoint behind, and may speak TLS 1.2.
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

# Who ends a connection says why, in an alert; but where the system resets it, that can be lost.
ENDED = "it ended the connection without a word, as one does that does not believe our certificate, or does not serve"


@dataclass(frozen=True)
class Tls:
    """Files in the format PEM: what a server shows, the key to that, without a password, and whom it believes."""

    certificate: Path
    key: Path
    authority: Path

    def context(self, *, listens: bool, public: bool = False) -> ssl.SSLContext:
        """For connections that others open (listens), or for those to others. public: who opens them need show no
        certificate, and may speak TLS 1.2.

        PyorchError, by file, for what cannot be.
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
            raise PyorchError(f"the key {self.key} has a password, which nobody could type: write it without one "
                              "(openssl pkey)") from None
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise PyorchError(f"the key {self.key} is not that of the certificate {self.certificate}") from None
            raise PyorchError(f"the certificate {self.certificate} and the key {self.key} are not both of the format "
                              f"PEM: {reason_of(error)}") from None
        return context

    def check(self, address: str) -> None:
        """Shows the certificate to itself, as another server with these files would see it at this address.

        PyorchError: a file cannot be used, the authority did not sign the certificate, it names another address, or
        its time is over.
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
            raise PyorchError(f"the certificate {self.certificate} does not do for {address}: "
                              f"{reason_of(error)}") from None


def check_keys(path: str) -> None:
    """PyorchError where a file has no API keys, or one that no request could name."""
    try:
        keys = keys_in(path)
    except OSError as error:
        raise PyorchError(f"the keys {path} cannot be read: {error.strerror}") from None
    if not keys:
        raise PyorchError(f"{path} has no key: it needs one in a line of its own, at least")
    for number, key in enumerate(keys, 1):
        if not re.fullmatch(r"[!-~]+", key):
            raise PyorchError(f"key {number} of {path} has characters that no request can name: letters, digits and "
                              "signs of ASCII do, without spaces and ends of lines of Windows")


def reason_of(error: OSError) -> str:
    """Why a handshake failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError)):
        return ENDED
    if isinstance(error, ssl.SSLError) and error.reason:
        return _REASONS.get(error.reason, error.reason.lower().replace("_", " "))
    if (error.errno or 0) > 0:
        return os.strerror(error.errno)  # asyncio puts the address in the place of the reason
    return error.strerror or str(error) or type(error).__name__


_REASONS = {
    "WRONG_VERSION_NUMBER": "what it sends is not TLS",
    "HTTP_REQUEST": "what it sends is not TLS",
    "UNSUPPORTED_PROTOCOL": "it speaks too old a version of TLS",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not believe our authority",
    "TLSV1_ALERT_DECRYPT_ERROR": "it does not believe our authority",  # but knows another one of the same name
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not believe our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired, it says",
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
        end.read(_RECORD)  # an alert comes behind the handshake
    except ssl.SSLWantReadError:
        pass
