"""How pods are spoken to over https: with this part's certificate, and their name instead of their address."""

from __future__ import annotations

import ssl
from typing import TypedDict

from contextcache.tls import WatchedTls


class TlsArguments(TypedDict, total=False):
    """What aiohttp takes with each request."""

    ssl: ssl.SSLContext
    server_hostname: str


def tls_arguments(url: str, tls: WatchedTls | None) -> TlsArguments:
    """Return the arguments for one request to `url`; none for http, or where only the system's CAs are believed.

    A context that has changed gets connections of its own: aiohttp keeps them apart.
    """
    if tls is None or not url.startswith("https:"):
        return {}
    return {"ssl": tls.current().client_context, "server_hostname": tls.server_name}
