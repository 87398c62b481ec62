"""One part's certificate, key and CA: read, tried out, and read again when the files change.

Every certificate of a deployment carries one name, which both ends check in place of addresses: pods come and go
under addresses nobody can foresee, and a CA may sign certificates of others too. What a context is used for is the
business of `channels.py`, `servers.py` and the gateway. It is loaded inside vLLM too.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from contextcache.process.settings import TlsFiles, file_version

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
"""Who has connected and not shown a certificate by then is gone."""
_LOOK_INTERVAL_S = 1.0
"""Between two looks at the files; a look is three `stat` calls."""
_RETRY_INTERVAL_S = 10.0
"""Between two tries of files that were broken."""
_READS_MAX = 5
"""Readings of files that change while they are read."""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files held at one time, tried out together. Another object means that they have changed."""

    certificate: bytes
    """PEM chain, this part's own certificate first."""
    key: bytes
    ca: bytes
    server_name: str
    expires_at_s: float
    """Unix time at which the certificate ends."""
    client_context: ssl.SSLContext
    """Shows the certificate, wants the CA's; give `server_name` as the host name."""
    server_context: ssl.SSLContext
    """Wants clients to show a certificate of the CA. Their name is yet to be checked: `carries_name`."""
    open_server_context: ssl.SSLContext
    """Takes clients without a certificate."""


class WatchedTls:
    """A part's TLS material; follows its files. Safe to use from several threads."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        on_failure: Callable[[], None] = lambda: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files. Raises OSError when one cannot be read, ValueError when they cannot serve together.

        `on_failure` is called at each later try that fails; the last good material stays.
        """
        self._files = files
        self._on_failure = on_failure
        self._monotonic_s = monotonic_s
        self._lock = Lock()
        self._version, self._material = _read(files)
        self._look_at_s = monotonic_s() + _LOOK_INTERVAL_S

    @property
    def server_name(self) -> str:
        """The name in every part's certificate."""
        return self._files.server_name

    def current(self) -> TlsMaterial:
        """Return the material of the files as they are, or were when they last were good. Never raises."""
        if self._monotonic_s() < self._look_at_s:
            return self._material
        with self._lock:
            if self._monotonic_s() >= self._look_at_s:
                self._look()
        return self._material

    def server_context(self, *, require_clients: bool) -> ssl.SSLContext:
        """Return what the next connection is let in by.

        Another one after the files have changed: what TLS 1.2 may resume (a ticket, a session's id) lives in a context,
        and goes with the CA that let it in.
        """
        material = self.current()
        return material.server_context if require_clients else material.open_server_context

    def _look(self) -> None:
        self._look_at_s = self._monotonic_s() + _LOOK_INTERVAL_S
        if _versions(self._files) == self._version:
            return
        try:
            self._version, self._material = _read(self._files)
        except (OSError, ValueError) as exc:
            # The version stays too, so that the files are tried again even when nobody touches them.
            self._look_at_s = self._monotonic_s() + _RETRY_INTERVAL_S
            log.warning("certificate reload failed, last good certificate stays", extra={"error": str(exc)})
            self._on_failure()
            return
        log.info("certificate reloaded", extra={"expires_at_s": round(self._material.expires_at_s)})


def open_tls(files: TlsFiles | None, *, on_failure: Callable[[], None] = lambda: None) -> WatchedTls | None:
    """Return the material of `files`, None when TLS is off. Raises as WatchedTls."""
    return None if files is None else WatchedTls(files, on_failure=on_failure)


def carries_name(certificate: Mapping[str, Any] | None, name: str) -> bool:
    """Return whether a certificate, as `getpeercert()` of a checked connection returns it, carries a DNS name."""
    return certificate is not None and ("DNS", name) in certificate.get("subjectAltName", ())


_Version = tuple[tuple[int, int, int] | None, ...]


def _versions(files: TlsFiles) -> _Version:
    return tuple(map(file_version, (files.cert_file, files.key_file, files.ca_file)))


def _read(files: TlsFiles) -> tuple[_Version, TlsMaterial]:
    """Return what belongs together: a mounted Secret may be switched between the reading of two files."""
    for _ in range(_READS_MAX):
        version = _versions(files)
        try:
            material = _tried(files)
        except (OSError, ValueError):
            if _versions(files) == version:
                raise
            continue
        if _versions(files) == version:
            return version, material
    raise ValueError(f"{files.cert_file} changes faster than it can be read")


def _tried(files: TlsFiles) -> TlsMaterial:
    certificate, key, ca = (path.read_bytes() for path in (files.cert_file, files.key_file, files.ca_file))
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    server = _context(ssl.PROTOCOL_TLS_SERVER, files)
    server.verify_mode = ssl.CERT_REQUIRED
    open_server = _context(ssl.PROTOCOL_TLS_SERVER, files)
    expires_at_s = _checked(client, server, files)
    return TlsMaterial(certificate, key, ca, files.server_name, expires_at_s, client, server, open_server)


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # The CA file is what is believed, also when an intermediate CA is all it names.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # A resumed session would be a connection whose certificate was checked by an older CA file.
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
    """Connect two contexts in memory, and return the Unix time at which the server's certificate ends.

    Checks all that a client would check. Raises ssl.SSLError.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=server_name)
    waiting = [asking, server.wrap_bio(to_server, to_client, server_side=True)]
    while waiting:
        waiting = [side for side in waiting if not _is_through(side)]
    shown = asking.getpeercert()
    assert shown is not None
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _checked(client: ssl.SSLContext, server: ssl.SSLContext, files: TlsFiles) -> float:
    """Connect a part to itself, which checks all that others will check; return when its certificate expires."""
    try:
        return shake_hands(client, server, server_name=files.server_name)
    except ssl.SSLCertVerificationError as exc:
        raise ValueError(f"other parts would reject {files.cert_file}: {exc.verify_message}") from exc
    except ssl.SSLError as exc:
        raise ValueError(f"other parts would reject {files.cert_file}: {exc.reason or exc}") from exc


def _is_through(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
