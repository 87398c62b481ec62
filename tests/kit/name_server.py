"""A DNS server in a cluster's place: answers for headless Services with the addresses it is told."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.kit.envoy_names import TYPE

_A = 1
_TTL_S = 5
_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183


class NameServer(asyncio.DatagramProtocol):
    """`addresses`: IPv4 addresses by name, without the last dot; change them at any time."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.port = 0
        self.silent = False
        """Answer nothing, as while the cluster's DNS is away."""
        self.asked: list[str] = []

    @classmethod
    @asynccontextmanager
    async def running(cls) -> AsyncIterator[NameServer]:
        """Serve on a free port of loopback."""
        loop = asyncio.get_running_loop()
        transport, server = await loop.create_datagram_endpoint(cls, local_addr=("127.0.0.1", 0))
        server.port = transport.get_extra_info("sockname")[1]
        try:
            yield server
        finally:
            transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        number, question, name, kind = _question(data)
        self.asked.append(name)
        if self.silent:
            return
        known = name.lower() in self.addresses
        found = self.addresses.get(name.lower(), []) if kind == _A else []
        head = struct.pack("!HHHHHH", number, _ANSWER if known else _NO_SUCH_NAME, 1, len(found), 0, 0)
        # 0xc00c: the name that was asked for.
        records = [
            struct.pack("!HHHIH4s", 0xC00C, _A, 1, _TTL_S, 4, ipaddress.IPv4Address(one).packed) for one in found
        ]
        self._transport.sendto(head + question + b"".join(records), addr)

    def asked_by(self, made: dict) -> dict:
        """Return a bootstrap whose clusters ask this server and nobody else."""
        server = {"socket_address": {"address": "127.0.0.1", "port_value": self.port, "protocol": "UDP"}}
        resolver = {
            "@type": f"{TYPE}extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
            "resolvers": [server],
        }
        for cluster in made["static_resources"]["clusters"]:
            if cluster["type"] == "STRICT_DNS":
                cluster["typed_dns_resolver_config"] = {
                    "name": "envoy.network.dns_resolver.cares",
                    "typed_config": resolver,
                }
        return made


def _question(data: bytes) -> tuple[int, bytes, str, int]:
    """Return number, the question's bytes, its name and its type."""
    labels, place = [], 12
    while data[place]:
        labels.append(data[place + 1 : place + 1 + data[place]].decode())
        place += 1 + data[place]
    (number,) = struct.unpack_from("!H", data)
    (kind,) = struct.unpack_from("!H", data, place + 1)
    return number, data[12 : place + 5], ".".join(labels), kind
