"""Makes an authority for a cluster, and a certificate for each of its servers, with the command openssl.

    python scripts/make_certificates.py clinic=10.0.0.1 lab=lab.example.org -o certificates

Writes authority.pem, and for each server NAME.pem and NAME.key, which cluster.toml names under [tls]. A certificate is
for one address, or several with commas between them. The authority's key, authority.key, is needed only to make further
certificates by another call with the same directory. Keep it away from the servers.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


def openssl(*arguments: object) -> None:
    """Runs openssl. If it fails, ends the program with its output."""
    try:
        done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit("there is no command openssl: install OpenSSL 3")
    if done.returncode:
        sys.exit(f"openssl {arguments[0]}: {done.stderr.strip()}")


def make_authority(directory: Path, period: tuple[str, ...]) -> None:
    sign(directory, "authority", "pyorch cluster", period,
         "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\nsubjectKeyIdentifier=hash\n", "-selfsign")


def make_certificate(directory: Path, name: str, addresses: list[str], period: tuple[str, ...]) -> None:
    names = ",".join(f"{'IP' if is_number(address) else 'DNS'}:{address}" for address in addresses)
    sign(directory, name, name, period,
         f"subjectAltName={names}\nbasicConstraints=CA:FALSE\nkeyUsage=critical,digitalSignature\n"
         "extendedKeyUsage=serverAuth,clientAuth\nauthorityKeyIdentifier=keyid\n",
         "-cert", directory / "authority.pem")


def sign(directory: Path, name: str, subject: str, period: tuple[str, ...], extensions: str, *signer: object) -> None:
    """Makes a new key, NAME.key, and a certificate for it, NAME.pem, signed with authority.key."""
    with tempfile.TemporaryDirectory() as temporary:
        at = Path(temporary)
        (at / "index").touch()
        (at / "extensions").write_text(extensions)
        (at / "config").write_text(
            f"[ca]\ndefault_ca=cluster\n[cluster]\ndatabase={at}/index\nnew_certs_dir={at}\nrand_serial=yes\n"
            "default_md=sha256\npolicy=name\n[name]\ncommonName=supplied\n")
        openssl("req", "-new", *_KEY, "-subj", f"/CN={subject}", "-keyout", directory / f"{name}.key", "-out",
                at / "request")
        openssl("ca", "-batch", "-notext", "-config", at / "config", "-in", at / "request", "-keyfile",
                directory / "authority.key", *signer, *period, "-extfile", at / "extensions", "-out",
                directory / f"{name}.pem")


def is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=ADDRESS[,ADDRESS]")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--begin", type=datetime.date.fromisoformat, metavar="YYYY-MM-DD",
                        default=datetime.date.today() - datetime.timedelta(days=1),
                        help="start of the certificates' validity (default: yesterday, because clocks differ)")
    parser.add_argument("--days", type=int, default=825, help="length of the validity (default: 825)")
    args = parser.parse_args()
    servers = dict(text.partition("=")[::2] for text in args.servers)
    for name, addresses in servers.items():
        if not name or not addresses or name == "authority" or "/" in name:
            sys.exit(f"{name}={addresses} is not of the form NAME=ADDRESS")
    end = args.begin + datetime.timedelta(days=args.days)
    period = ("-startdate", f"{args.begin:%Y%m%d}000000Z", "-enddate", f"{end:%Y%m%d}000000Z")
    os.umask(0o077)
    args.output.mkdir(parents=True, exist_ok=True)
    if not (args.output / "authority.pem").exists():
        make_authority(args.output, period)
    for name, addresses in servers.items():
        make_certificate(args.output, name, addresses.split(","), period)
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
