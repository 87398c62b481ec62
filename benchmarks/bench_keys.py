"""What Envoy's check of API keys costs: Envoys side by side without it, with one key and with 100 000.

One connection, one request at a time, answered by Envoy itself (a 404, or the stub pod's answer), in rounds that go
through all Envoys in turn, so that whatever drifts drifts for all. CPU is Envoy's own, from /proc. The last figure is
how long it takes from a changed key file until Envoy has the new keys.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.front.process_figures import cpu_seconds
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from deploy.local.progress import say
from deploy.local.table import render
from gateway.envoy.keys import discovered, watched_keys
from gateway.envoy.render import BOOTSTRAP, rendered
from gateway.envoy.settings import EnvoySettings, GatewayAddress
from gateway.tenants.keys import hash_key

KEY = "key-7"
LONG_KEY = "k" * 1024
_RELOADS = "extension_config_discovery.http_filter.api-keys.config_reload"


@dataclass
class Way:
    """One Envoy and what it was asked."""

    processes: Processes
    name: str
    """Of its Envoy."""
    key: str
    latencies_us: list[float] = field(default_factory=list)
    cpu_us: float = 0.0

    async def ask(self, num: int) -> None:
        """Send so many requests over one connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.processes.port(self.name))
        headers = f"host: g\r\nauthorization: Bearer {self.key}\r\ncontent-length: 2\r\n"
        request = f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n{{}}".encode()
        before = self._cpu_us()
        for _ in range(num):
            start_s = time.perf_counter()
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            self.latencies_us.append((time.perf_counter() - start_s) * 1e6)
        self.cpu_us += self._cpu_us() - before
        writer.close()

    def _cpu_us(self) -> float:
        return cpu_seconds(self.processes.pid(self.name)) * 1e6

    def num_reloads(self) -> int:
        """Return how often Envoy has taken keys over."""
        address = self.processes.address(f"{self.name} admin")
        answer = httpx.get(f"http://{address}/stats?filter=^{_RELOADS}$", timeout=5, trust_env=False)
        return int(answer.text.rpartition(":")[2] or 0)


def shape(keys_file: Path | None, pod: str, *, port: int, admin_port: int, access_log: Path) -> dict[str, Any]:
    """Return a bootstrap without the plugin: what is compared is the check alone."""
    settings = EnvoySettings(
        listen_port=port,
        admin_port=admin_port,
        gateways=(GatewayAddress(http=pod, ext_proc=pod),),
        pods=(pod,),
        access_log=str(access_log),
        config_dir=str((keys_file or access_log).with_suffix("")),
        api_keys_file=str(keys_file or ""),
    )
    if keys_file is not None:
        watched_keys(settings)
    made = rendered(settings)[BOOTSTRAP]
    manager = made["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [found for found in manager["http_filters"] if not found["name"].endswith("ext_proc")]
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        route["typed_per_filter_config"].pop("envoy.filters.http.ext_proc")
    return made


def start_way(processes: Processes, name: str, num_keys: int, key: str) -> Way:
    """Start an Envoy that knows so many keys; 0: one that checks none."""
    keys_file = None
    if num_keys:
        tenants = {KEY: "a", LONG_KEY: "a", **{f"key-{number}": "a" for number in range(100, 98 + num_keys)}}
        keys_file = processes.write_keys(f"{name}.keys.json", tenants)
    processes.start_envoy(name, partial(shape, keys_file, processes.address("stub")))
    return Way(processes, name, key)


async def reload_s(found: Way, num_keys: int) -> float:
    """Return how long Envoy needs to take new keys over, counted from the moment they are written."""
    filter_file = found.processes.directory / f"{found.name}.keys" / "keys" / "filter.json"
    new = filter_file.with_suffix(".new")
    new.write_text(json.dumps(discovered([hash_key(KEY), *(hash_key(f"new-{number}") for number in range(num_keys))])))
    start_s = time.perf_counter()
    taken_over = found.num_reloads() + 1
    new.replace(filter_file)
    while found.num_reloads() < taken_over:  # noqa: ASYNC110 - another process is asked
        await asyncio.sleep(0.02)
    await found.ask(1)
    return time.perf_counter() - start_s


async def measured(rounds: int, num: int) -> list[dict[str, Any]]:
    """Return a row for each way."""
    plan = {
        "no check": (0, KEY),
        "2 keys": (2, KEY),
        "100 000 keys": (100_000, KEY),
        "a key of 1 KiB": (2, LONG_KEY),
    }
    with tempfile.TemporaryDirectory(prefix="bench-keys-") as directory, Processes(Path(directory)) as processes:
        processes.start_stub()
        ways = {
            name: start_way(processes, f"envoy-{number}", *what) for number, (name, what) in enumerate(plan.items())
        }
        for each in ways.values():
            await each.ask(num)
            each.latencies_us.clear()
            each.cpu_us = 0.0
        for number in range(rounds):
            say(f"round {number + 1} of {rounds} …")
            for each in ways.values():
                await each.ask(num)
        base = statistics.median(ways["no check"].latencies_us)
        rows = [
            {
                "way": name,
                "p50_us": round(statistics.median(each.latencies_us), 1),
                "more_us": round(statistics.median(each.latencies_us) - base, 1),
                "cpu_us": round(each.cpu_us / (rounds * num), 1),
            }
            for name, each in ways.items()
        ]
        rows.append(
            {"way": "reload of 100 000 keys", "seconds": round(await reload_s(ways["100 000 keys"], 100_000), 2)}
        )
        return rows


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=1000, help="a round and way")
    options = parser.parse_args()
    rows = asyncio.run(measured(options.rounds, options.requests))
    write_result(options.out, {"rows": rows})
    columns = ("way", "p50_us", "more_us", "cpu_us", "seconds")
    print(render(columns, [[str(row.get(name, "")) for name in columns] for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
