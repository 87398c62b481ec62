"""The proxy of one server, as `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` name it, in either case.

httpx reads these variables too, but fails at entries that it does not know, even if no proxy is needed. A client of
ours has one server. So this module chooses the proxy once and passes it to httpx. Loopback never uses a proxy.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

import httpx

_SCHEMES = ("http", "https", "socks5", "socks5h")
"""Schemes of proxies that httpx speaks; the last two with the package `socksio`."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, and the variable that names it."""

    url: str = field(repr=False)
    """May hold a password."""
    shown: str
    """The URL without user and password."""
    variable: str


def proxy_of(url: str) -> Proxy | None:
    """Return the proxy for a server; None: connect directly. Raises ValueError in words for the user."""
    server = urlsplit(url)
    host = (server.hostname or "").rstrip(".")
    found = getproxies()
    kind = next((kind for kind in (server.scheme, "all") if found.get(kind)), None)
    if kind is None or _is_loopback(host) or _is_excluded(host, _port_of(server), found.get("no", "")):
        return None
    said = "".join(found[kind].split())
    value, variable = said if "://" in said else f"http://{said}", _variable(kind, found[kind])
    return Proxy(_checked(value, variable, host), _shown(value), variable)


def connection_options(proxy: Proxy | None) -> dict[str, Any]:
    """Return arguments of an httpx client that takes only certificates from the environment."""
    return {
        "proxy": None if proxy is None else proxy.url,
        "trust_env": False,
        "verify": httpx.create_ssl_context(trust_env=True),  # SSL_CERT_FILE, SSL_CERT_DIR
    }


def through(proxy: Proxy | None, url: str) -> str:
    """Return the end of an error's message: the proxy that was used, and the way to bypass it."""
    if proxy is None:
        return ""
    return f" (through proxy {proxy.shown} from {proxy.variable}; to bypass it, set NO_PROXY={urlsplit(url).hostname})"


def _checked(value: str, variable: str, host: str) -> str:
    cure = f"change {variable}, or set NO_PROXY={host}"
    scheme = ""
    with suppress(httpx.InvalidURL, ValueError):
        proxy = httpx.URL(value)
        scheme = proxy.scheme if proxy.host and urlsplit(value).port != 0 else ""
    if scheme not in _SCHEMES:
        usable = ", ".join(f"{name}://HOST:PORT" for name in _SCHEMES)
        raise ValueError(f"{variable} names the proxy {_shown(value)}; allowed: {usable}; {cure}")
    if scheme.startswith("socks") and find_spec("socksio") is None:
        raise ValueError(
            f"{variable} names the proxy {_shown(value)}, which needs a package: pip install 'httpx[socks]', or {cure}"
        )
    return value


def _shown(value: str) -> str:
    """Return the URL of a proxy without the part before the last `@`: user and password."""
    scheme, separator, rest = value.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('/')[0]}" if "@" not in scheme else "(not readable)"


def _variable(kind: str, value: str) -> str:
    named = (name for name, said in os.environ.items() if name.lower() == f"{kind}_proxy" and said == value)
    return next(named, "the system settings")


def _port_of(server: SplitResult) -> int:
    return server.port or {"https": 443}.get(server.scheme, 80)


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return mapped or address
    return None


def _is_excluded(host: str, port: int, no_proxy: str) -> bool:
    """Return whether NO_PROXY lists the server: names, their subdomains, addresses, networks, each with a port or none.

    An entry that is none of these excludes nothing, as with curl.
    """
    return any(_excludes(entry, host, port) for entry in no_proxy.replace(",", " ").lower().split())


def _excludes(entry: str, host: str, port: int) -> bool:
    if entry == "*":
        return True
    entry = entry.partition("://")[2] or entry
    address = _address(host)
    if address is not None:
        with suppress(ValueError):
            return address in ipaddress.ip_network(entry.strip("[]"), strict=False)
    name, colon, digits = entry.rpartition(":")
    if colon and digits.isdigit():
        return int(digits) == port and _excludes(name, host, port)
    name = entry.removeprefix("*").removeprefix(".")
    return bool(name) and address is None and (host == name or host.endswith(f".{name}"))
