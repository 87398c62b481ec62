"""The webhook's certificate, read again when its files change: their Secret is replaced while the pod runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from contextcache.process.reloaded import Reloaded, read_bounded
from contextcache.wire.tls import shake_hands
from pod_injector.metrics import InjectorMetrics

_NO_PASSWORD = ""
"""Without one OpenSSL would ask for it on the terminal, and wait."""


class Certificate:
    """A TLS context whose next handshake shows the newest good certificate.

    Unlike `contextcache.wire.tls` it has no CA: the API server shows no certificate of ours, and only it checks this.
    """

    def __init__(self, cert_file: Path, key_file: Path, metrics: InjectorMetrics) -> None:
        """Read the files. Raises OSError, of which `ssl.SSLError` is one, when they are no certificate and its key."""
        self._paths = (cert_file, key_file)
        self._metrics = metrics
        self.context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._files = Reloaded(
            *self._paths, read=self._load, name="certificate", on_failure=metrics.certificate_reload_failures.inc
        )

    def reload(self) -> bool:
        """Read the files again if they changed; return whether they did. Bad ones are counted and not used."""
        return self._files.look()

    async def watch(self, interval_s: float) -> None:
        """Look at the files every `interval_s` seconds, until cancelled."""
        await self._files.follow(interval_s)

    def _load(self) -> None:
        for file in self._paths:
            read_bounded(file)  # OpenSSL does not name a missing file
        # First elsewhere: with a key that is another's the context in use would be left with half of each.
        expires_at_s = _expires_at_s(*self._paths)
        self.context.load_cert_chain(*self._paths, password=_NO_PASSWORD)
        self._metrics.certificate_expiry.set(expires_at_s)


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _expires_at_s(cert_file: Path, key_file: Path) -> float:
    """Return the Unix time at which the certificate ends, which a client sees that believes nothing but it."""
    server_context, client_context = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
    server_context.load_cert_chain(cert_file, key_file, password=_NO_PASSWORD)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(cert_file)
    return shake_hands(client_context, server_context, server_name=None)
