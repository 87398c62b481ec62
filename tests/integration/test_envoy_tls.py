"""Envoy with certificates: who it believes, what it shows, and that new files arrive while requests run."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import pytest
import trustme
from cryptography import x509

from tests.kit.certificates import NAME, CertificateFiles, chain_of, server_context
from tests.kit.envoy_names import GATEWAY_HTTP, PLUGIN, PODS
from tests.kit.envoy_process import DEADLINE_S, RunningEnvoy, envoy_settings, running_envoy
from tests.kit.stub_engine import StubEngine
from tests.kit.stub_processor import StubProcessor
from tests.kit.until import until

FILES = ("tls.crt", "tls.key", "ca.crt")


class MountedSecret(CertificateFiles):
    """The files as the kubelet mounts them: links into a folder that is replaced beside them."""

    def __init__(self, directory: Path, *, ca: trustme.CA | None = None, name: str = NAME) -> None:
        super().__init__(directory, ca=ca, name=name)
        self.directory = directory
        for file in FILES:
            (directory / file).symlink_to(f"current/{file}")

    def settings_of_envoy(self, *, listen: bool = False) -> dict[str, str]:
        prefix = "listen" if listen else "tls"
        names = {"cert": "tls.crt", "key": "tls.key", **({} if listen else {"ca": "ca.crt"})}
        return {f"{prefix}_{kind}_file": str(self.directory / file) for kind, file in names.items()}


def serial_of(leaf: trustme.LeafCert) -> int:
    der = ssl.PEM_cert_to_DER_cert(leaf.cert_chain_pems[0].bytes().decode())
    return serial_in(der)


def serial_in(der: bytes) -> int:
    return x509.load_der_x509_certificate(der).serial_number


def context_of(ca: trustme.CA, name: str = NAME) -> ssl.SSLContext:
    """Return the context of a part, which asks callers for a certificate of the same CA."""
    return server_context(ca.issue_cert(name), clients=ca)


def server_credentials(ca: trustme.CA, name: str = NAME) -> grpc.ServerCredentials:
    leaf = ca.issue_cert(name)
    pair = (leaf.private_key_pem.bytes(), chain_of(leaf))
    return grpc.ssl_server_credentials([pair], root_certificates=ca.cert_pem.bytes(), require_client_auth=True)


@dataclass
class Front:
    """Envoy and the three parts behind it, each with a certificate."""

    envoy: RunningEnvoy
    pod: StubEngine
    plugin: StubProcessor
    gateway: StubEngine
    http: aiohttp.ClientSession

    async def post(self, body: bytes = b"{}", *, headers: dict[str, str] | None = None) -> int:
        async with self.http.post(f"{self.envoy.url}/v1/completions", data=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    def shown(self) -> set[int]:
        """Return the serial numbers of the certificates that the pod has been shown."""
        return {int(peer["serialNumber"], 16) for peer in self.pod.peers if peer}


@asynccontextmanager
async def running_front(secret: MountedSecret, *, pod=None, plugin=None, gateway=None, **more):
    """`pod`, `plugin`, `gateway`: (CA, name) of certificates other than the deployment's."""
    right = (secret.ca, NAME)
    async with AsyncExitStack() as stack:
        parts = (
            StubEngine(tls=context_of(*(pod or right))),
            StubProcessor(credentials=server_credentials(*(plugin or right))),
            StubEngine(tls=context_of(*(gateway or right))),
        )
        for part in parts:
            await part.start()
            stack.push_async_callback(part.stop)
        engine, processor, front = parts
        processor.pick = f"127.0.0.1:{engine.port}"
        settings = envoy_settings(
            pods=[engine.port],
            gateways=[(front.port, processor.port)],
            plugin_timeout_s=60,
            connect_timeout_s=20,
            **{**secret.settings_of_envoy(), **more},
        )
        envoy = await stack.enter_async_context(running_envoy(settings))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)))
        yield Front(envoy, engine, processor, front, http)


@pytest.fixture
def secret(tmp_path):
    return MountedSecret(tmp_path / "tls")


async def test_every_part_behind_envoy_is_spoken_to_with_certificates_of_both_sides(secret):
    async with running_front(secret) as front:
        for cluster in (PODS, PLUGIN, GATEWAY_HTTP):
            await front.envoy.until_healthy(cluster, 1)
        turn = await front.post(headers={"x-session-id": "ctx_1"})
        async with front.http.get(f"{front.envoy.url}/v1/context/ctx_1") as answer:
            control = answer.status

        assert (turn, control) == (200, 200)
        assert len(front.plugin.heads) == 1
        assert {peer["subjectAltName"] for peer in (*front.pod.peers, *front.gateway.peers)} == {(("DNS", NAME),)}


@pytest.fixture(params=["a name of somebody else's", "a CA of somebody else's"])
def other(request, secret):
    """CA and name of a certificate that is not the deployment's."""
    return (secret.ca, "somebody") if request.param.startswith("a name") else (trustme.CA(), NAME)


async def test_a_pod_with_another_certificate_is_not_spoken_to(secret, other):
    async with running_front(secret, pod=other) as front:
        await front.envoy.until_healthy(PLUGIN, 1)
        async with front.http.post(f"{front.envoy.url}/v1/completions", data=b"{}") as answer:
            refused = answer.status, (await answer.json())["error"]["code"]

        assert refused == (503, "no_ready_endpoint")
        assert front.pod.received == []
        assert await front.envoy.stat(f"cluster.{PODS}.ssl.fail_verify_{'san' if other[0] is secret.ca else 'error'}")


async def test_a_plugin_with_another_certificate_is_not_asked(secret, other):
    async with running_front(secret, plugin=other) as front:
        await front.envoy.until_healthy(PODS, 1)
        status = await front.post(headers={"x-session-id": "ctx_1"})

        assert status == 503
        assert front.plugin.heads == []
        assert front.pod.turns == []


async def test_a_new_certificate_is_shown_without_a_restart_and_costs_no_request(secret):
    async with running_front(secret) as front:
        await front.envoy.until_healthy(PODS, 1)
        await front.envoy.until_healthy(PLUGIN, 1)
        stopped, statuses = asyncio.Event(), []

        async def client() -> None:
            while not stopped.is_set():
                statuses.append(await front.post())

        clients = [asyncio.create_task(client()) for _ in range(4)]
        leaf = secret.rotate()
        streams = []

        async def is_shown() -> bool:
            # Each one that runs needs a connection of its own.
            streams.append(await front.http.post(f"{front.envoy.url}/v1/completions", data=b'{"stream": true}'))
            return serial_of(leaf) in front.shown()

        await until(is_shown, what="the new certificate is shown", interval_s=0.05)
        stopped.set()
        await asyncio.gather(*clients)
        for stream in streams:
            stream.close()

        assert set(statuses) == {200}
        assert {stream.status for stream in streams} == {200}


async def test_a_new_ca_is_believed_without_a_restart(secret):
    async with running_front(secret) as front:
        await front.envoy.until_healthy(PODS, 1)
        new = trustme.CA()
        await front.pod.stop()
        # The pod is the first to have a certificate of the new CA, and believes both.
        front.pod.tls = context_of(new)
        secret.ca.configure_trust(front.pod.tls)
        await front.pod.start()
        await front.envoy.until_healthy(PODS, 0)
        leaf = secret.ca.issue_cert(NAME)
        both = secret.ca.cert_pem.bytes() + new.cert_pem.bytes()
        secret.replace(chain_of(leaf), leaf.private_key_pem.bytes(), both)
        await front.envoy.until_healthy(PODS, 1)

        assert await front.post() == 200


async def test_files_that_are_broken_leave_the_good_ones_in_place(secret):
    async with running_front(secret) as front:
        await front.envoy.until_healthy(PODS, 1)
        await front.envoy.until_healthy(PLUGIN, 1)
        secret.replace(b"nonsense", b"nonsense", secret.ca.cert_pem.bytes())
        await front.envoy.until_stat("sds.own-certificate.key_rotation_failed", 1)
        while_broken = await front.post()
        leaf = secret.rotate()
        await front.envoy.until_stat(f"cluster.{PODS}.client_ssl_socket_factory.ssl_context_update_by_sds", 3)
        stream = await front.http.post(f"{front.envoy.url}/v1/completions", data=b'{"stream": true}')
        other = await front.post()
        stream.close()

        assert (while_broken, other) == (200, 200)
        assert serial_of(leaf) in front.shown()


async def shown_to_clients(port: int) -> int:
    """Return the serial number of the certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return serial_in(der)


async def test_clients_get_https_with_a_certificate_that_changes_without_a_restart(tmp_path, secret):
    public = MountedSecret(tmp_path / "listen", name="localhost")
    async with running_front(secret, **public.settings_of_envoy(listen=True)) as front:
        await front.envoy.until_healthy(PODS, 1)
        await front.envoy.until_healthy(PLUGIN, 1)
        trusted = ssl.create_default_context()
        public.ca.configure_trust(trusted)
        url = f"https://localhost:{front.envoy.port}/v1/completions"
        connector = aiohttp.TCPConnector(ssl=trusted, family=socket.AF_INET)
        async with aiohttp.ClientSession(connector=connector) as http, http.post(url, data=b"{}") as answer:
            status = answer.status
        before = await shown_to_clients(front.envoy.port)
        leaf = public.rotate(name="localhost")
        await until(
            lambda: shown_to_clients(front.envoy.port), is_so=lambda shown: shown != before, what="another certificate"
        )

        assert status == 200
        assert await shown_to_clients(front.envoy.port) == serial_of(leaf)


async def test_https_takes_http_2_and_no_plain_text(tmp_path, secret):
    public = MountedSecret(tmp_path / "listen", name="localhost")
    async with running_front(secret, **public.settings_of_envoy(listen=True)) as front:
        context = ssl.create_default_context()
        public.ca.configure_trust(context)
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection(
            "127.0.0.1", front.envoy.port, ssl=context, server_hostname="localhost"
        )
        protocol = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.envoy.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            plain = (await asyncio.gather(reader.read(), return_exceptions=True))[0]
        writer.close()

        assert protocol == "h2"
        assert isinstance(plain, ConnectionError) or not plain.startswith(b"HTTP")
