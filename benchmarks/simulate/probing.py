"""What looking at a pod costs a gateway: the real probe, over loopback, of a pod that answers at once. Measured."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time

import aiohttp
from prometheus_client import CollectorRegistry

from gateway.metrics import Metrics
from gateway.pods.endpoints import WatchedEndpoints
from gateway.pods.probe import HttpProbe
from gateway.pods.state import Endpoint

PODS = 50
ROUNDS = 10
_READY_S = 10.0


def probe_cpu_s() -> float:
    """Return CPU seconds of this process for one probe of one pod."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.front.stub_engine", "--port", str(port)]
    pod = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        return asyncio.run(_probed(port))
    finally:
        pod.terminate()
        pod.wait()


async def _probed(port: int) -> float:
    pods = [Endpoint(f"pod-{number}", f"http://127.0.0.1:{port}") for number in range(PODS)]
    async with aiohttp.ClientSession() as session:
        endpoints = WatchedEndpoints(pods, HttpProbe(session, timeout_s=5.0), metrics=Metrics(CollectorRegistry()))
        async with asyncio.timeout(_READY_S):
            while not all(state.ready for state in endpoints.states()):
                await endpoints.probe_all()
                await asyncio.sleep(0.1)
        began_s = time.process_time()
        for _ in range(ROUNDS):
            await endpoints.probe_all()
        return (time.process_time() - began_s) / (PODS * ROUNDS)
