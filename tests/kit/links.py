"""Links between the parts of a stack that run through proxies, so that a test can cut, slow or silence them.

A part learns where another is from its environment, its command line or the list of pods: there the proxy's address
takes the place of the part's own. What is not named stays direct.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.local.parts import Part, numbered
from deploy.local.paths import StackPaths
from deploy.local.ports import LOOPBACK, PortPlan
from kv_sidecar.tiers.arena import SUFFIX
from tests.kit.faults.proxy import Proxy

_TOLD_BY = {
    "manager-redis": ("manager", "MANAGER_REDIS_URL"),
    "gateway-manager": ("gateway", "GATEWAY_MANAGER"),
    "turn-manager": ("turn", "TURN_MANAGER"),
    "turn-sidecar": ("turn", "TURN_SIDECAR"),
    "turn-engine": ("turn", "TURN_ENGINE_URL"),
    "sidecar-manager": ("sidecar", "SIDECAR_MANAGER"),
}
"""Who asks, and the variable that says where."""
_URLS = {"manager-redis": "redis://{}/0", "turn-engine": "http://{}"}
"""How that variable spells an address, where it is a URL."""
_ENDPOINTS = {"gateway-turn": "turn_url", "gateway-engine": "url", "gateway-sidecar": "sidecar"}
"""Fields of the list of pods."""
LINKS = (*_TOLD_BY, *_ENDPOINTS, "connector-sidecar")
"""Who asks whom; from the second engine on with its number, `turn-manager-1`. Sidecars ask each other at the address
that the gateway knows, so `gateway-sidecar` is that link too. Envoy asks pods over `gateway-turn` and
`gateway-engine`."""
CLIENT_LINKS = {"client-envoy": "envoy", "client-front": "gateway"}
"""Links of ours to the parts that clients call; `Stack.url` and `front_url` follow them."""


class Links:
    """The proxied links of one stack."""

    def __init__(self, ports: PortPlan, paths: StackPaths, names: Iterable[str]) -> None:
        self._ports = ports
        self._paths = paths
        self.proxies = {name: self._proxy(name) for name in names}
        """By link name; only those that were asked for."""

    def start(self) -> None:
        for name, proxy in self.proxies.items():
            proxy.start()
            if name.startswith("connector-sidecar"):
                # No proxy passes descriptors: the arena is borrowed past it.
                at, target = (address.removeprefix("unix://") + SUFFIX for address in (proxy.address, proxy.target))
                Path(at).symlink_to(target)

    def heal(self) -> None:
        for proxy in self.proxies.values():
            proxy.heal()

    def close(self) -> None:
        for name, proxy in self.proxies.items():
            proxy.close()
            if name.startswith("connector-sidecar"):
                Path(proxy.address.removeprefix("unix://") + SUFFIX).unlink(missing_ok=True)

    def client_url(self, link: str, direct: str) -> str:
        """Return where clients go: through the proxy of this link where there is one."""
        return f"http://{self.proxies[link].address}" if link in self.proxies else direct

    def overlaid(self, part: Part) -> Part:
        """Return a part that asks through the proxies."""
        env = dict(part.env)
        for name, proxy in self.proxies.items():
            base, number = _parsed(name)
            asker, variable = _TOLD_BY.get(base, ("", ""))
            if part.name == numbered(asker, number):
                env[variable] = _URLS.get(base, "{}").format(proxy.address)
        if part.kind == "sidecar":
            peers = json.loads(env["SIDECAR_PEERS"])
            env["SIDECAR_PEERS"] = json.dumps([self._instead_of_sidecar(peer) for peer in peers])
        if part.kind == "envoy":
            env["ENVOY_PODS"] = json.dumps([self._instead_of_turn(pod) for pod in json.loads(env["ENVOY_PODS"])])
            engines = json.loads(env["ENVOY_ENGINES"])
            env["ENVOY_ENGINES"] = json.dumps([self._instead_of_engine(engine) for engine in engines])
        return replace(part, env=env, command=self._command(part))

    def endpoints(self, endpoints: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the list of pods with the proxies' addresses in it."""
        found = [dict(endpoint) for endpoint in endpoints]
        for name, proxy in self.proxies.items():
            base, number = _parsed(name)
            if (field := _ENDPOINTS.get(base)) is not None:
                found[number][field] = f"http://{proxy.address}" if field.endswith("url") else proxy.address
        return found

    def _command(self, part: Part) -> tuple[str, ...]:
        """Return the command line; the connector finds its sidecar by it."""
        link = part.name.replace("engine", "connector-sidecar")
        if part.kind != "engine" or link not in self.proxies:
            return part.command
        command = list(part.command)
        at = command.index("--kv-transfer-config") + 1
        transfer = json.loads(command[at])
        transfer["kv_connector_extra_config"]["sidecar"] = self.proxies[link].address
        command[at] = json.dumps(transfer)
        return tuple(command)

    def _instead_of_sidecar(self, address: str) -> str:
        return self._instead_of(address, "gateway-sidecar", self._ports.sidecar)

    def _instead_of_turn(self, address: str) -> str:
        return self._instead_of(address, "gateway-turn", self._ports.turn)

    def _instead_of_engine(self, address: str) -> str:
        return self._instead_of(address, "gateway-engine", self._ports.engine)

    def _instead_of(self, address: str, link: str, port_of: Callable[[int], int]) -> str:
        direct: Mapping[str, str] = {
            f"{LOOPBACK}:{port_of(_parsed(name)[1])}": proxy.address
            for name, proxy in self.proxies.items()
            if _parsed(name)[0] == link
        }
        return direct.get(address, address)

    def _proxy(self, link: str) -> Proxy:
        """Return the proxy of a link, listening where `start` says; on a Unix socket beside the stack's own."""
        ports = self._ports
        if link in CLIENT_LINKS:
            target = {"envoy": ports.envoy, "gateway": ports.gateway}[CLIENT_LINKS[link]]
            return Proxy(f"{LOOPBACK}:{target}")
        base, number = _parsed(link)
        if base in ("turn-sidecar", "connector-sidecar"):
            socket = self._paths.sidecar_socket(numbered("sidecar", number))
            # Beside the stack's own directory, which that empties when it starts; short, as a socket's path must be.
            listen = socket.parent.with_name(f"{socket.parent.name}-{link}.sock")
            return Proxy(f"unix://{socket}", listen=f"unix://{listen}")
        asked = {
            "redis": ports.redis,
            "manager": ports.manager,
            "engine": ports.engine(number),
            "turn": ports.turn(number),
            "sidecar": ports.sidecar(number),
        }
        return Proxy(f"{LOOPBACK}:{asked[base.partition('-')[2]]}")


def _parsed(link: str) -> tuple[str, int]:
    """Return a link's name without its number, and that."""
    if link in CLIENT_LINKS:
        return link, 0
    base, _, number = link.rpartition("-")
    base, number = (base, number) if number.isdigit() else (link, "0")
    assert base in LINKS, f"no link is called {link}: {', '.join((*LINKS, *CLIENT_LINKS))}"
    return base, int(number)
