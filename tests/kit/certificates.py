"""Certificates of a test's own, in files that are replaced as a mounted Secret is: all at once, by a link."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from contextcache.process.settings import TlsFiles

NAME = "context-cache"


def chain_of(leaf: trustme.LeafCert) -> bytes:
    """Return a certificate and its issuers below the root, as PEM."""
    return b"".join(pem.bytes() for pem in leaf.cert_chain_pems)


def server_context(leaf: trustme.LeafCert, *, clients: trustme.CA) -> ssl.SSLContext:
    """Return a context that shows `leaf` and requires certificates of `clients`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    clients.configure_trust(context)
    leaf.configure_cert(context)
    return context


def client_context(ca: trustme.CA, leaf: trustme.LeafCert | None) -> ssl.SSLContext:
    """Return a context that trusts `ca` and shows `leaf`, if any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(context)
    if leaf is not None:
        leaf.configure_cert(context)
    return context


def strangers(ca: trustme.CA) -> dict[str, trustme.LeafCert | None]:
    """Return certificates that no part of a deployment with this CA has."""
    return {
        "none": None,
        "another CA's": trustme.CA().issue_cert(NAME),
        "another name": ca.issue_cert("somebody-else"),
        "the name in front of another": ca.issue_cert(f"{NAME}.evil"),
        "the name of no host": ca.issue_cert("x", common_name=NAME),
    }


class CertificateFiles:
    """A deployment's CA, and the files of one part."""

    def __init__(self, directory: Path, *, ca: trustme.CA | None = None, name: str = NAME) -> None:
        self.ca = ca or trustme.CA()
        self._directory = directory
        self._num_versions = 0
        self.rotate(name=name)

    @property
    def files(self) -> TlsFiles:
        current = self._directory / "current"
        return TlsFiles(current / "tls.crt", current / "tls.key", current / "ca.crt", NAME)

    @property
    def environment(self) -> dict[str, str]:
        """Settings of a part, without its prefix."""
        files = self.files
        return {
            "TLS_CERT_FILE": str(files.cert_file),
            "TLS_KEY_FILE": str(files.key_file),
            "TLS_CA_FILE": str(files.ca_file),
        }

    @property
    def settings(self) -> dict[str, str]:
        """The same by the names of the fields."""
        return {name.lower(): value for name, value in self.environment.items()}

    def rotate(self, *, name: str = NAME, days: int = 30) -> trustme.LeafCert:
        """Put a new certificate in place of the one before."""
        leaf = self.ca.issue_cert(name, not_after=datetime.now(UTC) + timedelta(days=days))
        self.replace(chain_of(leaf), leaf.private_key_pem.bytes(), self.ca.cert_pem.bytes())
        return leaf

    def replace(self, certificate: bytes, key: bytes, ca: bytes) -> None:
        """Put these bytes in place."""
        self._num_versions += 1
        version = self._directory / f"v{self._num_versions}"
        version.mkdir(parents=True)
        for file, content in (("tls.crt", certificate), ("tls.key", key), ("ca.crt", ca)):
            (version / file).write_bytes(content)
        link = self._directory / "next"
        link.symlink_to(version.name)
        link.replace(self._directory / "current")
