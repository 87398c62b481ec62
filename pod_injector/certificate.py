"""The webhook's TLS context, made again when the certificate's files change.

It has no CA, unlike `contextcache.wire.tls`: the API server shows no certificate of ours, and no other client connects.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from contextcache.process.reloaded import Reloaded, read_bounded
from contextcache.wire.tls import shake_hands
from pod_injector.metrics import InjectorMetrics

_NO_PASSWORD = ""
"""Password of the key. With None, OpenSSL would ask for one on the terminal and wait."""


def open_certificate(cert_file: Path, key_file: Path, metrics: InjectorMetrics) -> Reloaded[ssl.SSLContext]:
    """Return the context for incoming connections. Raises OSError or ValueError unless the files fit each other."""

    def read() -> ssl.SSLContext:
        for file in (cert_file, key_file):
            read_bounded(file)  # OpenSSL does not name a missing file
        server, client = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
        server.load_cert_chain(cert_file, key_file, password=_NO_PASSWORD)
        # A client that trusts only this certificate sees whether it is valid, and its expiry.
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(cert_file)
        metrics.certificate_expiry.set(shake_hands(client, server, server_name=None))
        return server

    return Reloaded(
        cert_file, key_file, read=read, name="certificate", on_failure=metrics.certificate_reload_failures.inc
    )


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
