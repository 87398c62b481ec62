"""TLS of the gateway's HTTP: who may speak to its front, which pods it speaks to, and its plain port for probes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import trustme

import contextcache.wire.http_server
from context_manager.server import manager_server
from contextcache.wire.tls import WatchedTls
from gateway.__main__ import serve
from tests.kit.certificates import NAME, CertificateFiles, client_context, server_context, strangers
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import RunningManager, settings_for
from tests.kit.ports import free_port
from tests.kit.stub_engine import StubEngine
from tests.kit.until import until, wait_until

DEADLINE_S = 60
ROOT = Path(__file__).parents[2]
REFUSED = "refused"


@pytest.fixture
def certificates(tmp_path):
    return CertificateFiles(tmp_path / "tls")


class TlsManager(RunningManager):
    """A manager of the same deployment."""

    def __init__(self, tls: WatchedTls) -> None:
        super().__init__()
        self._tls = tls

    async def start(self) -> None:
        self._server = manager_server(self.manager, listen="127.0.0.1:0", max_concurrent_rpcs=100, tls=self._tls)
        self.port = self._server.ports[0]
        await self._server.start()


@pytest.fixture
async def manager(certificates):
    manager = TlsManager(WatchedTls(certificates.files))
    await manager.start()
    yield manager
    await manager.stop()


@asynccontextmanager
async def running_pod(leaf: trustme.LeafCert, ca: trustme.CA):
    pod = StubEngine(tls=server_context(leaf, clients=ca))
    await pod.start()
    yield pod
    await pod.stop()


@asynccontextmanager
async def running_front(tmp_path, certificates, engine, manager, *, probe_interval_s=0.05, **more):
    """Return the port of a gateway's front and of its probes."""
    metrics_port = free_port()
    settings = settings_for(
        tmp_path,
        {"pod-a": engine},
        manager_port=manager.port,
        metrics_port=metrics_port,
        **{"probe_timeout_s": 15, "connect_timeout_s": 30, "manager_timeout_s": 30, **certificates.settings, **more},
    )
    settings = settings.model_copy(update={"probe_interval_s": probe_interval_s})
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(settings, stop, on_started=started.set_result))
    await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    try:
        yield started.result().http, metrics_port
    finally:
        stop.set()
        await asyncio.wait_for(serving, DEADLINE_S)


async def got(url: str, *, tls: ssl.SSLContext | None = None, http: aiohttp.ClientSession | None = None):
    """Return status and body of a GET, or that there was no answer."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    arguments = {} if tls is None else {"ssl": tls, "server_hostname": NAME}
    session = http or aiohttp.ClientSession()
    try:
        async with session.get(url, timeout=timeout, **arguments) as answer:
            return answer.status, await answer.text()
    except aiohttp.ClientError:
        return REFUSED
    finally:
        if http is None:
            await session.close()


async def completed(port: int, tls: ssl.SSLContext) -> int:
    """Return the status of a completion that a pod answers."""
    body, headers = json.dumps({"prompt": "x"}), {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
        url = f"https://127.0.0.1:{port}/v1/completions"
        async with http.post(url, data=body, headers=headers, ssl=tls, server_hostname=NAME) as answer:
            await answer.read()
            return answer.status


async def test_the_front_answers_certificates_of_the_deployment_only(tmp_path, certificates, engine, manager):
    ca = certificates.ca
    leaves = {"ours": ca.issue_cert(NAME), **strangers(ca)}
    async with running_front(tmp_path, certificates, engine, manager) as (port, _):
        url = f"https://127.0.0.1:{port}/healthz"
        answers = {name: await got(url, tls=client_context(ca, leaf)) for name, leaf in leaves.items()}
        answers["plain text"] = await got(f"http://127.0.0.1:{port}/healthz")
        wrong_name = await asyncio.to_thread(raw_request, port, client_context(ca, leaves["another name"]))

    assert answers.pop("ours")[0] == 200
    assert set(answers.values()) == {REFUSED}, answers
    assert wrong_name == b""


def raw_request(port: int, context: ssl.SSLContext) -> bytes:
    """Return all that a server says to a request."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as connection,
    ):
        try:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(4096), b""))
        except OSError:
            return b""


async def test_without_tls_clients_whoever_has_an_api_key_is_served(tmp_path, certificates, engine, manager):
    async with running_front(tmp_path, certificates, engine, manager, tls_clients="none") as (port, _):
        anonymous, foreign = client_context(certificates.ca, None), client_context(trustme.CA(), None)

        assert await completed(port, anonymous) == 200
        assert await got(f"https://127.0.0.1:{port}/healthz", tls=foreign) == REFUSED


async def test_probes_and_prometheus_need_no_certificate_on_their_own_port(tmp_path, certificates, engine, manager):
    async with running_front(tmp_path, certificates, engine, manager) as (_, port):
        url = f"http://127.0.0.1:{port}"
        ready = await until_ready(port)
        health, page = [await got(url + path) for path in ("/healthz", "/metrics")]
        other, posted = await got(f"{url}/v1/context"), await asyncio.to_thread(posted_to, port)

    assert json.loads(ready[1])["ready"]
    assert health == (200, "ok\n")
    assert 'contextcache_gateway_certificate_expiry_timestamp_seconds{certificate="parts"}' in page[1]
    assert other[0] == 404
    assert posted.startswith(b"HTTP/1.1 405 ")


def posted_to(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(b"POST /metrics HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        return connection.recv(4096)


async def test_a_pod_over_https_is_probed_and_spoken_to_by_the_name_in_its_certificate(tmp_path, certificates, manager):
    ca = certificates.ca
    async with (
        running_pod(ca.issue_cert(NAME), ca) as pod,
        running_front(tmp_path, certificates, pod, manager) as (port, probes),
    ):
        await until_ready(probes)
        assert await completed(port, client_context(ca, ca.issue_cert(NAME))) == 200
        assert len(pod.turns) == 1


@pytest.mark.parametrize("pods", ["another CA's", "another name"])
async def test_a_pod_with_a_certificate_of_others_gets_no_request(tmp_path, certificates, manager, pods):
    ca = certificates.ca
    theirs = trustme.CA().issue_cert(NAME) if pods == "another CA's" else ca.issue_cert("somebody-else")
    async with running_pod(theirs, ca) as pod, running_front(tmp_path, certificates, pod, manager) as (port, probes):
        await until(
            lambda: got(f"http://127.0.0.1:{probes}/readyz"),
            is_so=lambda answer: answer[0] == 503 and json.loads(answer[1])["missing"] == ["ready endpoint"],
            what="only a pod is missing",
        )
        assert await completed(port, client_context(ca, ca.issue_cert(NAME))) == 503
        assert not pod.received


async def test_a_pod_that_was_ready_and_changes_its_name_gets_no_request(tmp_path, certificates, manager):
    ca = certificates.ca
    async with (
        running_pod(ca.issue_cert(NAME), ca) as pod,
        running_front(tmp_path, certificates, pod, manager, probe_interval_s=600) as (port, probes),
    ):
        ours = client_context(ca, ca.issue_cert(NAME))
        await until_ready(probes)
        # Nobody probes it now: it is the request's own connection that has to notice.
        await pod.stop()
        pod.tls = server_context(ca.issue_cert("somebody-else"), clients=ca)
        await pod.start()

        assert await completed(port, ours) == 503
        assert not pod.turns


async def test_new_files_are_shown_to_new_connections_and_old_connections_go_on(
    tmp_path, certificates, engine, manager, monkeypatch
):
    now_s = [0.0]
    monkeypatch.setattr(
        "contextcache.process.metrics.open_tls",
        lambda files, on_failure: WatchedTls(files, on_failure=on_failure, monotonic_s=lambda: now_s[0]),
    )
    ca, next_ca = certificates.ca, trustme.CA()
    async with running_front(tmp_path, certificates, engine, manager) as (port, _):
        url, ours = f"https://127.0.0.1:{port}/healthz", client_context(ca, ca.issue_cert(NAME))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=ours, server_hostname=NAME)
        # An idle connection has 5 s, one in the middle of a head 30.
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")

        # All at once: certificate, key and CA.
        certificates.ca = next_ca
        certificates.rotate()
        now_s[0] += 60
        theirs = client_context(next_ca, next_ca.issue_cert(NAME))
        assert await got(url, tls=ours) == REFUSED
        assert (await got(url, tls=theirs))[0] == 200
        assert await got(url, tls=client_context(next_ca, ca.issue_cert(NAME))) == REFUSED
        writer.write(b"connection: close\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_client_that_never_shakes_hands_is_gone_at_the_deadline(
    tmp_path, certificates, engine, manager, monkeypatch
):
    assert contextcache.wire.http_server.HANDSHAKE_TIMEOUT_S == 10
    monkeypatch.setattr(contextcache.wire.http_server, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with running_front(tmp_path, certificates, engine, manager) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()


def test_the_process_itself_keeps_to_it_on_its_own_event_loop(tmp_path, certificates):
    """The process runs on uvloop, whose TLS is another one than asyncio's."""
    settings = settings_for(tmp_path, {"pod-a": StubEngine(port=1)})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")} | {
        "GATEWAY_PORT": "0",
        "GATEWAY_MANAGER": "127.0.0.1:1",
        "GATEWAY_ENDPOINTS": '[{"name": "pod-a", "url": "https://127.0.0.1:1"}]',
        "GATEWAY_SECRET_FILE": str(settings.secret_file),
        "GATEWAY_API_KEYS_FILE": str(settings.api_keys_file),
        **{f"GATEWAY_{name}": value for name, value in certificates.environment.items()},
    }
    ca = certificates.ca
    command = [sys.executable, "-m", "gateway"]
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        lines = (json.loads(line) for line in process.stderr if line.startswith("{"))
        port = next(line["port"] for line in lines if line["event"] == "gateway started")
        assert raw_request(port, client_context(ca, ca.issue_cert(NAME))).startswith(b"HTTP/1.1 200 ")
        assert raw_request(port, client_context(ca, ca.issue_cert("somebody-else"))) == b""
        assert raw_request(port, client_context(ca, None)) == b""
        certificates.ca = trustme.CA()
        certificates.rotate()
        renewed = client_context(certificates.ca, certificates.ca.issue_cert(NAME))
        # It looks for new files once a second.
        answer = wait_until(
            lambda: raw_request(port, renewed), what="new files are used", despite=(ssl.SSLCertVerificationError,)
        )
        assert answer.startswith(b"HTTP/1.1 200 ")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


async def until_ready(port: int) -> tuple[int, str]:
    """Return the answer of a probe when it is 200."""
    return await until(
        lambda: got(f"http://127.0.0.1:{port}/readyz"), is_so=lambda answer: answer[0] == 200, what="it is ready"
    )
