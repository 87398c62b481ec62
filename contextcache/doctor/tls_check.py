"""Check of the front's certificate: its name, its issuer and its expiry. Opens a socket of its own."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contextcache.doctor.finding import Finding, failed, ok, warning

_SOON_DAYS = 14.0
CA_FILE, CERT_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"
"""Names in a Secret of the chart or of cert-manager."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """A certificate that is trusted."""

    server_name: str
    """Name that the certificate was checked for."""
    expires_at_s: float


def client_context(*, ca_file: Path | None, parts_dir: Path | None) -> ssl.SSLContext:
    """Return a context that trusts the system's CAs and the given ones. Raises OSError.

    `parts_dir` holds the certificate of the release's parts: a gateway without Envoy asks its clients for it.
    """
    context = ssl.create_default_context()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    if parts_dir is not None:
        context.load_verify_locations(parts_dir / CA_FILE)
        context.load_cert_chain(parts_dir / CERT_FILE, parts_dir / KEY_FILE)
    return context


def shake_hands(
    host: str, port: int, *, context: ssl.SSLContext, names: Sequence[str], timeout_s: float
) -> Handshake | ssl.SSLError:
    """Connect and return the first name that the certificate has, or why it is not trusted. Raises OSError."""
    refusal: ssl.SSLError = ssl.SSLError("no name to check")
    for name in names:
        try:
            with (
                socket.create_connection((host, port), timeout=timeout_s) as connection,
                context.wrap_socket(connection, server_hostname=name) as secured,
            ):
                shown = secured.getpeercert() or {}
                return Handshake(name, float(ssl.cert_time_to_seconds(str(shown["notAfter"]))))
        except ssl.SSLError as exc:
            refusal = exc
    return refusal


def certificate(
    outcome: Handshake | ssl.SSLError, host: str, *, now_s: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """Report whether a certificate is trusted, expires soon, or has another name than the host."""
    if isinstance(outcome, ssl.SSLError):
        reason = getattr(outcome, "verify_message", "") or getattr(outcome, "reason", "") or "the handshake failed"
        hint = "Pass its CA with --ca-file, its name with --server-name, and the release's files with --tls-dir."
        yield failed("certificate", f"is not trusted: {reason}", hint)
        return
    name, left_days = outcome.server_name, (outcome.expires_at_s - now_s()) / 86_400
    facts = {"server_name": name, "days": round(left_days, 1)}
    if left_days < _SOON_DAYS:
        hint = "Check its renewal. cert-manager: `kubectl describe certificate`."
        yield warning("certificate", f"expires in {left_days:.0f} days", hint, **facts)
    else:
        yield ok("certificate", f"for {name}, {left_days:.0f} days left", **facts)
    if name != host:
        hint = "Clients that check names will reject it for this URL."
        yield warning("certificate", f"is for {name}, not for {host}", hint)


def plain(host: str) -> Iterator[Finding]:
    """Report whether plain HTTP leaves this machine or cluster."""
    inside = host in {"localhost", "127.0.0.1", "::1"} or host.endswith((".svc", ".cluster.local")) or "." not in host
    if inside:
        yield ok("certificate", "plain HTTP, within the cluster or this machine")
    else:
        hint = "Set envoy.tls.existingSecret, or terminate TLS in a load balancer in front."
        yield warning("certificate", f"API keys travel to {host} in clear text", hint)
