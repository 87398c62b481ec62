"""Mutual TLS of every gRPC port, over real connections: who is let in, and what a change of files costs."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

import contextcache.wire.servers
from context_manager.client import ContextManagerClient
from context_manager.manager import ContextCacheManager
from context_manager.server import manager_server
from contextcache.clock import SystemClock
from contextcache.errors import CacheRefNotFound, ContextNotFound, SidecarUnavailable, StoreUnavailable
from contextcache.names import new_cache_ref
from contextcache.wire.channels import Connection
from contextcache.wire.rpc import CHANNEL_OPTIONS
from contextcache.wire.servers import bind
from contextcache.wire.tls import WatchedTls
from gateway.envoy.front import EnvoyFront
from gateway.envoy.server import ExtProcServer
from gateway.tenants.keys import SingleTenant
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.limits import Limits
from kv_sidecar.moving.peer import PeerSidecar
from kv_sidecar.server import serve
from tests.kit.certificates import NAME, CertificateFiles, chain_of, strangers
from tests.kit.gateway_parts import SECRET, GatewayParts
from tests.kit.kv_blocks import FINGERPRINT, TENANT, SidecarUnderTest
from tests.kit.session_store import in_valkey
from tests.kit.until import until
from vllm_plugin.turn.app import compose_turns
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.settings import TurnSettings

DEADLINE_S = 30
PARTS = ("manager", "sidecar", "external processor")


@pytest.fixture
def certificates(tmp_path):
    return CertificateFiles(tmp_path / "tls")


@asynccontextmanager
async def running_manager(tls):
    manager = ContextCacheManager(**in_valkey())
    server = manager_server(manager, listen="127.0.0.1:0", max_concurrent_rpcs=100, tls=tls)
    await server.start()
    yield server.ports[0]
    await server.stop(0)


@asynccontextmanager
async def running_sidecar(certificates, directory):
    async with SidecarUnderTest(directory, clock=SystemClock(), **certificates.settings) as kv:
        server = serve(kv.sidecar, ["127.0.0.1:0", f"unix://{directory}/s.sock"])
        await server.start()
        yield server.ports[0]
        await server.stop(0)


@asynccontextmanager
async def running_processor(tls):
    parts = GatewayParts(SingleTenant())
    front = EnvoyFront(parts.gateway)
    server = ExtProcServer(front, listen="127.0.0.1:0", max_body_bytes=1 << 20, is_ready=lambda: True, tls=tls)
    await server.start()
    yield server.ports[0]
    await server.stop(0)


def running(part, certificates, tmp_path):
    if part == "sidecar":
        return running_sidecar(certificates, tmp_path)
    tls = WatchedTls(certificates.files)
    return running_manager(tls) if part == "manager" else running_processor(tls)


async def asked(port: int, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    """Return how a health check of the server ends."""
    target, options = f"127.0.0.1:{port}", [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NAME)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    async with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as exc:
            return exc.code()
    return grpc.StatusCode.OK


def credentials_of(leaf: trustme.LeafCert | None, ca: trustme.CA) -> grpc.ChannelCredentials:
    """Return credentials that believe `ca` and show `leaf`."""
    if leaf is None:
        return grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    return grpc.ssl_channel_credentials(ca.cert_pem.bytes(), leaf.private_key_pem.bytes(), chain_of(leaf))


@pytest.mark.parametrize("part", PARTS)
async def test_a_port_answers_certificates_of_the_deployment_only(part, certificates, tmp_path):
    ca = certificates.ca
    async with running(part, certificates, tmp_path) as port:
        of_ours = await asked(port, credentials_of(ca.issue_cert(NAME), ca))
        of_others = {name: await asked(port, credentials_of(leaf, ca)) for name, leaf in strangers(ca).items()}
        in_plain_text = await asked(port, None)

    assert of_ours is grpc.StatusCode.OK
    by_handshake = {"none", "another CA's"}
    assert {name for name, code in of_others.items() if code is grpc.StatusCode.UNAVAILABLE} == by_handshake
    by_name = of_others.keys() - by_handshake
    assert {name for name, code in of_others.items() if code is grpc.StatusCode.PERMISSION_DENIED} == by_name
    assert in_plain_text is grpc.StatusCode.UNAVAILABLE


async def _says_nothing():
    """A message that meets the refusal on its way may end the call as an internal fault of grpc's own."""
    await asyncio.Event().wait()
    yield b""


async def test_streams_are_refused_to_other_names_as_well(certificates, tmp_path):
    stranger = CertificateFiles(tmp_path / "stranger", ca=certificates.ca)
    stranger_leaf = certificates.ca.issue_cert("somebody-else")
    async with running_sidecar(certificates, tmp_path) as port:
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NAME)]
        credentials = credentials_of(stranger_leaf, stranger.ca)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
            codes = {}
            for method in ("LoadBlocks", "SaveBlocks", "DeleteContext"):
                path = f"/contextcache.v1.KVSidecarService/{method}"
                kind = {"LoadBlocks": channel.unary_stream, "SaveBlocks": channel.stream_unary}
                call = kind.get(method, channel.unary_unary)(path)
                answer = call(_says_nothing() if method == "SaveBlocks" else b"", timeout=DEADLINE_S)
                codes[method] = await answer.code()

    assert set(codes.values()) == {grpc.StatusCode.PERMISSION_DENIED}, codes


def peer_at(address: str, tls: WatchedTls) -> PeerSidecar:
    limits = Limits(block_tokens=1, pull_bytes_per_s_min=1 << 30, manifest_timeout_s=DEADLINE_S)
    return PeerSidecar(address, timeout_s=DEADLINE_S, limits=limits, slots=asyncio.Semaphore(1), tls=tls)


@pytest.mark.parametrize("server", ["another CA's", "another name", "plain text"])
async def test_clients_refuse_servers_that_are_not_of_the_deployment(server, certificates, tmp_path):
    theirs = CertificateFiles(tmp_path / "theirs", ca=certificates.ca)
    tls = None
    if server != "plain text":
        ca = trustme.CA() if server == "another CA's" else certificates.ca
        theirs = CertificateFiles(tmp_path / "server", ca=ca)
        files = theirs.files
        if server == "another name":
            theirs.rotate(name="somebody-else")
            files = type(files)(files.cert_file, files.key_file, files.ca_file, "somebody-else")
        tls = WatchedTls(files)
    ours = WatchedTls(certificates.files)
    async with running_manager(tls) as port:
        address = f"127.0.0.1:{port}"
        manager = ContextManagerClient(address, timeout_s=DEADLINE_S, tls=ours)
        sidecar = KVSidecarClient(address, timeout_s=DEADLINE_S, tls=ours)
        peer = peer_at(address, ours)

        with pytest.raises(StoreUnavailable):
            await manager.locate("demo", "ctx_1")
        with pytest.raises(SidecarUnavailable):
            await sidecar.stats()
        with pytest.raises(SidecarUnavailable):
            await peer.manifest(TENANT, new_cache_ref())
        assert not await manager.is_serving()
        for client in (manager, sidecar, peer):
            await client.close()


async def test_parts_of_a_deployment_understand_each_other(certificates, tmp_path):
    ours = WatchedTls(certificates.files)
    async with running_manager(ours) as manager_port, running_sidecar(certificates, tmp_path) as sidecar_port:
        manager = ContextManagerClient(f"127.0.0.1:{manager_port}", timeout_s=DEADLINE_S, tls=ours)
        sidecar = KVSidecarClient(f"127.0.0.1:{sidecar_port}", timeout_s=DEADLINE_S, tls=ours)
        in_the_pod = KVSidecarClient(f"unix://{tmp_path}/s.sock", timeout_s=DEADLINE_S, tls=ours)
        peer = peer_at(f"127.0.0.1:{sidecar_port}", ours)

        assert await manager.is_serving()
        with pytest.raises(ContextNotFound):
            await manager.locate("demo", "ctx_1")
        for client in (sidecar, in_the_pod):
            assert (await client.stats()).num_contexts == 0
        with pytest.raises(CacheRefNotFound):
            await peer.manifest(TENANT, new_cache_ref())
        for client in (manager, sidecar, in_the_pod, peer):
            await client.close()


async def test_a_sidecar_pulls_from_a_peer_of_its_deployment_and_from_no_other(certificates, tmp_path):
    stranger = CertificateFiles(tmp_path / "stranger")
    async with (
        running_node(certificates, tmp_path / "there") as there,
        running_node(stranger, tmp_path / "elsewhere") as elsewhere,
        running_node(certificates, tmp_path / "here") as here,
    ):
        new = await there.kv.save(tuple(range(10)))
        refused = await elsewhere.kv.save(tuple(range(10)))
        assert await here.client.pull_context(TENANT, [new.cache_ref], peer=there.address) == "started"
        assert await here.client.pull_context(TENANT, [refused.cache_ref], peer=elsewhere.address) == "started"
        await until(here.client.stats, is_so=lambda stats: not stats.num_pulls, what="no pull is going on")

        manifest, tier = await here.client.get_manifest(TENANT, new.cache_ref)
        assert (manifest.token_ids, tier) == (tuple(range(10)), "peer")
        with pytest.raises(CacheRefNotFound):
            await here.client.get_manifest(TENANT, refused.cache_ref)


@dataclass
class Node:
    """A sidecar that others pull from."""

    kv: SidecarUnderTest
    address: str
    client: KVSidecarClient


@asynccontextmanager
async def running_node(certificates, directory):
    settings = {"peers": ("127.0.0.0/8",), "manifest_timeout_s": 20, "pull_timeout_s": 30, **certificates.settings}
    async with SidecarUnderTest(directory, clock=SystemClock(), **settings) as kv:
        server = serve(kv.sidecar, ["127.0.0.1:0"])
        await server.start()
        kv.sidecar.engine.introduce(0, 1, FINGERPRINT, "")
        address = f"127.0.0.1:{server.ports[0]}"
        client = KVSidecarClient(address, timeout_s=DEADLINE_S, tls=kv.sidecar.tls)
        yield Node(kv, address, client)
        await client.close()
        await kv.sidecar.pulls.close()
        await server.stop(0)


async def test_certificates_and_their_ca_change_under_load_without_one_lost_call(certificates):
    next_ca = trustme.CA()
    now_s = [0.0]
    server_tls = WatchedTls(certificates.files, monotonic_s=lambda: now_s[0])
    client_tls = WatchedTls(certificates.files, monotonic_s=lambda: now_s[0])
    seen: set[bytes] = set()
    async with running_manager(server_tls) as port:
        client = ContextManagerClient(f"127.0.0.1:{port}", timeout_s=DEADLINE_S, tls=client_tls)
        stop = asyncio.Event()
        answers = []

        async def ask_again_and_again():
            while not stop.is_set():
                with pytest.raises(ContextNotFound):
                    await client.locate("demo", "ctx_1")
                answers.append(client_tls.current().certificate)

        asking = [asyncio.create_task(ask_again_and_again()) for _ in range(8)]

        async def until_answered_with_new_files():
            certificate = certificates.files.cert_file.read_bytes()
            already = answers.count(certificate)

            def num_new() -> int:
                assert not any(task.done() for task in asking)
                return answers.count(certificate) - already

            await until(num_new, is_so=lambda number: number >= 50, what="50 answers more with this certificate")
            seen.add(await asyncio.to_thread(certificate_shown, port, certificates))

        await until_answered_with_new_files()
        both = certificates.ca.cert_pem.bytes() + next_ca.cert_pem.bytes()
        # As a CA is replaced: first everybody believes both, then certificates change, then the old one goes.
        for change in ("certificate", "both CAs", "new CA"):
            if change == "certificate":
                certificates.rotate()
            elif change == "both CAs":
                old = certificates.files
                certificates.replace(old.cert_file.read_bytes(), old.key_file.read_bytes(), both)
            else:
                leaf = next_ca.issue_cert(NAME)
                certificates.replace(chain_of(leaf), leaf.private_key_pem.bytes(), both)
            now_s[0] += 60
            await until_answered_with_new_files()
        stop.set()
        await asyncio.gather(*asking)
        await client.close()

    assert len(seen) == 3, "a new connection is shown the new certificate"


async def test_a_client_shows_its_new_certificate_while_calls_on_the_old_one_run_to_their_end(
    certificates, monkeypatch
):
    monkeypatch.setattr("contextcache.wire.channels._SETTLING_S", 0)
    now_s = [0.0]
    tls = WatchedTls(certificates.files, monotonic_s=lambda: now_s[0])
    arrived, release = asyncio.Event(), asyncio.Event()

    async def who(request: bytes, context) -> bytes:
        if request == b"wait":
            arrived.set()
            await release.wait()
        return context.auth_context()["x509_pem_cert"][0]

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(who)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Who", {"Call": method}),))
    port = bind(server, "127.0.0.1:0", tls=tls)
    await server.start()
    connection = Connection(f"127.0.0.1:{port}", tls=tls)

    async def called(request: bytes) -> bytes:
        return await connection.channel().unary_unary("/test.Who/Call")(request, timeout=DEADLINE_S)

    first = certificates.files.cert_file.read_bytes()
    waiting = asyncio.create_task(called(b"wait"))
    await arrived.wait()
    certificates.rotate()
    now_s[0] += 60
    shown = [await called(b""), await called(b"")]
    closed, _ = await asyncio.wait(connection._leftovers, timeout=0.2)
    assert not closed, "there is a call on it"
    release.set()

    assert await waiting == first
    assert shown == [certificates.files.cert_file.read_bytes()] * 2
    await connection.close()
    await server.stop(0)


def certificate_shown(port: int, certificates: CertificateFiles) -> bytes:
    """Return the certificate that a new connection is shown."""
    files = certificates.files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.ca_file)
    context.load_cert_chain(files.cert_file, files.key_file)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as connection,
    ):
        return connection.getpeercert(binary_form=True)


async def test_who_connects_and_shows_nothing_is_gone_at_the_deadline(certificates, monkeypatch):
    options = dict(contextcache.wire.servers.SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] == 10_000
    options["grpc.server_handshake_timeout_ms"] = 200
    monkeypatch.setattr(contextcache.wire.servers, "SERVER_OPTIONS", list(options.items()))
    async with running_manager(WatchedTls(certificates.files)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()


async def test_connections_are_bounded_and_those_that_go_make_room(certificates, monkeypatch):
    options = dict(contextcache.wire.servers.SERVER_OPTIONS)
    options["grpc.max_allowed_incoming_connections"] = 4
    options["grpc.server_handshake_timeout_ms"] = 600_000
    monkeypatch.setattr(contextcache.wire.servers, "SERVER_OPTIONS", list(options.items()))
    tls = WatchedTls(certificates.files)
    async with running_manager(tls) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in silent]
        ended = await until(
            lambda: sum(end.done() for end in ends), is_so=lambda number: number >= 8, what="8 have ended"
        )
        assert ended == 8

        for _, writer in silent:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)
        client = ContextManagerClient(f"127.0.0.1:{port}", timeout_s=DEADLINE_S, tls=tls)
        await until(client.is_serving, what="the manager serves")
        await client.close()


async def test_the_turn_middleware_speaks_tls_to_the_manager_and_its_sidecar(certificates, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    ours = WatchedTls(certificates.files)
    async with running_manager(ours) as manager_port, running_sidecar(certificates, tmp_path) as sidecar_port:
        settings = TurnSettings(
            manager=f"127.0.0.1:{manager_port}",
            sidecar=f"127.0.0.1:{sidecar_port}",
            secret_file=tmp_path / "secret",
            rpc_deadline_ms=DEADLINE_S * 1000,
            **certificates.settings,
        )
        metrics = TurnMetrics(CollectorRegistry())
        story = compose_turns(settings, metrics, metrics.process.open_tls(settings.tls), lambda _standby: None)

        with pytest.raises(ContextNotFound):
            await story.manager.begin_turn("demo", "ctx_1", lease_id="l", lease_ttl_ms=1000)
        await story.kv.drop(TENANT, "ref_1")
        await story.close()
