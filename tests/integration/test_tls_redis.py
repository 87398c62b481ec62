"""Redis over TLS: whom the manager believes, what it shows, and what a change of its files costs."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager

import pytest
import trustme

from context_manager.redis_address import RedisTls
from context_manager.redis_address import redis_tls as tls_of
from context_manager.redis_connection import RedisConnection
from context_manager.settings import ManagerSettings
from contextcache.errors import StoreUnavailable
from tests.kit.certificates import CertificateFiles, server_context
from tests.kit.valkey import ValkeyServer

DEADLINE_S = 30
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


class TlsRedis:
    """TLS in front of a Redis that speaks none: wants certificates of `clients`, counts who came."""

    def __init__(self, redis_port: int, leaf: trustme.LeafCert, *, clients: trustme.CA) -> None:
        self._redis_port = redis_port
        self._context = server_context(leaf, clients=clients)
        self.shown: list[bytes] = []
        """Certificates of the connections, in their order."""
        self._tasks: set[asyncio.Task] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, HOST, 0, ssl=self._context)
        return self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader, writer) -> None:
        self._tasks.add(asyncio.create_task(self._connected(reader, writer)))

    async def _connected(self, reader, writer) -> None:
        self.shown.append(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        there, back = await asyncio.open_connection(HOST, self._redis_port)
        try:
            await asyncio.gather(_pumped(reader, back), _pumped(there, writer))
        finally:
            for end in (writer, back):
                end.transport.abort()


async def _pumped(reader, writer) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def running_redis(valkey, leaf, ca):
    redis = TlsRedis(valkey.port, leaf, clients=ca)
    port = await redis.start()
    yield redis, f"rediss://{HOST}:{port}/0"
    await redis.stop()


@asynccontextmanager
async def connected(url: str, tls: RedisTls | None):
    connection = RedisConnection(url, timeout_s=DEADLINE_S, max_connections=4, tls=tls)
    yield connection
    await connection.close()


def redis_tls(certificates: CertificateFiles, **more) -> RedisTls:
    files = certificates.files
    return RedisTls(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file, **more)


async def test_redis_is_believed_by_its_ca_and_shown_the_managers_certificate(valkey, tmp_path):
    certificates = CertificateFiles(tmp_path / "tls")
    ca, files = certificates.ca, certificates.files
    settings = ManagerSettings(
        redis_ca_file=files.ca_file, redis_cert_file=files.cert_file, redis_key_file=files.key_file
    )
    async with (
        running_redis(valkey, ca.issue_cert(HOST), ca) as (redis, url),
        connected(url, tls_of(settings, on_failure=lambda: None)) as connection,
    ):
        assert await connection.call("ECHO", "x") == b"x"

    pem = certificates.files.cert_file.read_text()
    assert redis.shown == [ssl.PEM_cert_to_DER_cert(pem)]


@pytest.mark.parametrize("trouble", ["the system's CAs only", "another CA", "another host", "no certificate of ours"])
async def test_a_redis_that_cannot_be_believed_or_does_not_believe_us_is_unavailable(valkey, tmp_path, trouble):
    certificates = CertificateFiles(tmp_path / "tls")
    ca = certificates.ca
    tls = redis_tls(certificates)
    leaf = ca.issue_cert(HOST)
    if trouble == "the system's CAs only":
        tls = None
    elif trouble == "another CA":
        leaf = trustme.CA().issue_cert(HOST)
    elif trouble == "another host":
        leaf = ca.issue_cert("redis.example")
    else:
        tls = RedisTls(ca_file=certificates.files.ca_file, cert_file=None, key_file=None)
    async with running_redis(valkey, leaf, ca) as (_, url), connected(url, tls) as connection:
        with pytest.raises(StoreUnavailable):
            await connection.call("ECHO", "x")


async def test_changed_files_serve_new_connections_and_no_call_is_lost(valkey, tmp_path):
    certificates = CertificateFiles(tmp_path / "tls")
    now_s = [0.0]
    tls = redis_tls(certificates, monotonic_s=lambda: now_s[0])
    ca = certificates.ca
    async with (
        running_redis(valkey, ca.issue_cert(HOST), ca) as (redis, url),
        connected(url, tls) as connection,
    ):
        for _ in range(3):
            await asyncio.gather(*(connection.call("ECHO", "x") for _ in range(20)))
            certificates.rotate()
            now_s[0] += 60
        answers = await asyncio.gather(*(connection.call("ECHO", "x") for _ in range(20)))

        assert answers == [b"x"] * 20
        assert len(set(redis.shown)) == 4
