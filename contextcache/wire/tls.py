"""One part's certificate, key and CA: read, tried out, and read again when the files change. Loaded inside vLLM too.

Every certificate of a deployment carries one name, which both ends check in place of addresses. Pod addresses change,
and a CA may sign certificates of other deployments. `channels.py`, `servers.py` and the gateway use the contexts.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from contextcache.process.reloaded import Reloaded, read_bounded
from contextcache.process.settings import TlsFiles

HANDSHAKE_TIMEOUT_S = 10.0
"""Time after which a connection without a finished handshake is closed."""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The content of the files at one time, tried out together. A changed file makes a new object."""

    certificate: bytes
    """PEM chain, this part's own certificate first."""
    key: bytes
    ca: bytes
    server_name: str
    expires_at_s: float
    """Unix time at which the certificate expires."""
    client_context: ssl.SSLContext
    """Shows the certificate and verifies the server by the CA. Pass `server_name` as the host name."""
    server_context: ssl.SSLContext
    """Requires a client certificate of the CA. Its name is still to be checked: `carries_name`."""
    open_server_context: ssl.SSLContext
    """Accepts clients without a certificate."""


class WatchedTls:
    """A part's TLS material; follows its files. Safe to use from several threads."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        on_failure: Callable[[], object] = lambda: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files. Raises OSError when one cannot be read, ValueError when they do not fit together.

        `on_failure`: see Reloaded.
        """
        self.server_name = files.server_name
        """The name in every part's certificate."""
        self._files = Reloaded(
            files.cert_file,
            files.key_file,
            files.ca_file,
            read=lambda: _read(files),
            name="certificate",
            on_failure=on_failure,
            monotonic_s=monotonic_s,
        )

    def current(self) -> TlsMaterial:
        """Return the material of the last good files. Never raises."""
        return self._files.current()

    def server_context(self, *, require_clients: bool) -> ssl.SSLContext:
        """Return the context for the next incoming connection.

        Changed files make a new context. A TLS 1.2 session, by ticket or id, resumes only in its own context, so
        sessions that an old CA let in end with it.
        """
        material = self.current()
        return material.server_context if require_clients else material.open_server_context


def open_tls(files: TlsFiles | None, *, on_failure: Callable[[], object] = lambda: None) -> WatchedTls | None:
    """Return the material of `files`, None when TLS is off. Raises as WatchedTls."""
    return None if files is None else WatchedTls(files, on_failure=on_failure)


def carries_name(certificate: Mapping[str, Any] | None, name: str) -> bool:
    """Return whether a certificate, as `getpeercert()` of a verified connection returns it, carries a DNS name."""
    return certificate is not None and ("DNS", name) in certificate.get("subjectAltName", ())


def tls_arguments(url: str, tls: WatchedTls | None) -> dict[str, Any]:
    """Return the arguments of an aiohttp request to a pod by https: our certificate, and the pods' TLS name.

    The name replaces the pod's address. Empty for http, and without `tls`: then the system's CAs apply. aiohttp opens
    new connections for a new context.
    """
    if tls is None or not url.startswith("https:"):
        return {}
    return {"ssl": tls.current().client_context, "server_hostname": tls.server_name}


def _read(files: TlsFiles) -> TlsMaterial:
    paths = (files.cert_file, files.key_file, files.ca_file)
    certificate, key, ca = map(read_bounded, paths)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    server, open_server = _context(ssl.PROTOCOL_TLS_SERVER, files), _context(ssl.PROTOCOL_TLS_SERVER, files)
    server.verify_mode = ssl.CERT_REQUIRED
    try:
        # A part connects to itself, which runs every check of the other parts.
        expires_at_s = shake_hands(client, server, server_name=files.server_name)
    except ssl.SSLError as exc:
        reason = getattr(exc, "verify_message", None) or exc.reason or exc
        raise ValueError(f"other parts would reject {files.cert_file}: {reason}") from exc
    return TlsMaterial(certificate, key, ca, files.server_name, expires_at_s, client, server, open_server)


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # The CA file is trusted also when it names only an intermediate CA.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # A resumed session would carry a certificate that an older CA file verified.
        context.num_tickets = 0
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files.cert_file, files.key_file, password=_no_password)
    except ssl.SSLError as exc:
        raise ValueError(
            f"{files.cert_file} and {files.key_file} are not a PEM certificate and its private key: {exc.reason or exc}"
        ) from exc
    try:
        context.load_verify_locations(files.ca_file)
    except ssl.SSLError as exc:
        raise ValueError(f"{files.ca_file} has no PEM certificate: {exc.reason or exc}") from exc
    return context


def _no_password() -> str:
    raise ValueError("the TLS private key is encrypted; remove its password")


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, *, server_name: str | None) -> float:
    """Connect two contexts in memory; return the Unix time at which the server's certificate expires.

    Checks everything that a client would check. Raises ssl.SSLError.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=server_name)
    waiting = [asking, server.wrap_bio(to_server, to_client, server_side=True)]
    while waiting:
        waiting = [side for side in waiting if not _is_through(side)]
    shown = asking.getpeercert()
    assert shown is not None
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _is_through(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
