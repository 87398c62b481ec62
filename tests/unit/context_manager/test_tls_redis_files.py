"""The certificate files for Redis, and URLs whose faults must not be told with their passwords."""

from __future__ import annotations

import pytest

from context_manager.redis_address import RedisTls
from context_manager.redis_connection import RedisConnection
from tests.kit.certificates import CertificateFiles

PASSWORD = "pass-word-9"


@pytest.fixture
def certificates(tmp_path):
    return CertificateFiles(tmp_path / "tls")


def tls_of(certificates, **more) -> RedisTls:
    files = certificates.files
    return RedisTls(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file, **more)


def connect(url: str, tls: RedisTls | None = None) -> RedisConnection:
    return RedisConnection(url, timeout_s=1, max_connections=4, tls=tls)


@pytest.mark.parametrize(
    "url",
    [
        f"user:{PASSWORD}@redis:6379",
        f"https://user:{PASSWORD}@redis",
        f"redis://user:{PASSWORD}@redis:port/0",
        f"redis://user:{PASSWORD}/@redis:6379",
        f"redis://user:{PASSWORD}@[redis",
        f"redis+cluster://user:{PASSWORD}@redis:port",
        f"redis+sentinel://user:{PASSWORD}@redis:port/main",
        f"redis+sentinel://user:x/{PASSWORD}@redis:1/main",
        f"redis+sentinel://user:{PASSWORD}@redis",
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url):
    with pytest.raises(ValueError) as refused:
        connect(url)
    told = str(refused.value)
    assert PASSWORD not in told
    assert refused.value.__suppress_context__ or refused.value.__cause__ is None


@pytest.mark.parametrize("url", ["redis://redis:6379", "unix:///tmp/x.sock", "redis+sentinel://s1/main"])
def test_certificate_files_without_tls_are_refused(certificates, url):
    with pytest.raises(ValueError, match="rediss"):
        connect(url, tls_of(certificates))


@pytest.mark.parametrize("url", ["rediss://redis", "rediss+cluster://redis", "rediss+sentinel://s1/main"])
async def test_every_topology_takes_the_files(certificates, url):
    await connect(url, tls_of(certificates)).close()


def test_sentinels_are_asked_over_tls_as_the_data_nodes_are(certificates):
    connection = connect("rediss+sentinel://s1/main", tls_of(certificates))
    ca_file = str(certificates.files.ca_file)

    clients = (connection._clients.client, *connection._clients.sentinels)
    assert [client.connection_pool.connection_kwargs["ssl_ca_certs"] for client in clients] == [ca_file] * 2


@pytest.mark.parametrize("missing", ["cert_file", "key_file", "ca_file"])
def test_a_missing_file_is_named(certificates, missing):
    path = getattr(certificates.files, missing)
    path.unlink()

    with pytest.raises((OSError, ValueError)) as refused:
        tls_of(certificates)
    assert path.name in str(refused.value)


def test_a_certificate_without_its_key_is_refused(certificates):
    files = certificates.files

    with pytest.raises(ValueError, match="belong together"):
        RedisTls(ca_file=files.ca_file, cert_file=files.cert_file, key_file=None)


def test_a_key_of_another_certificate_is_refused(certificates):
    files = certificates.files
    certificate, ca = files.cert_file.read_bytes(), files.ca_file.read_bytes()
    certificates.replace(certificate, certificates.ca.issue_cert("x").private_key_pem.bytes(), ca)

    with pytest.raises(ValueError, match="are not a PEM certificate and its private key"):
        tls_of(certificates)


def test_a_broken_change_is_counted_and_a_good_one_is_told_once(certificates):
    """Files are read again as tests/unit/contextcache/test_reloaded.py says."""
    now_s, failures = [0.0], []
    tls = tls_of(certificates, on_failure=lambda: failures.append(now_s[0]), monotonic_s=lambda: now_s[0])

    def has_changed(at_s: float) -> bool:
        now_s[0] = at_s
        return tls.has_changed()

    certificates.replace(b"nonsense", b"nonsense", certificates.files.ca_file.read_bytes())
    assert [has_changed(at_s) for at_s in (0, 1)] == [False, False]
    assert failures == [1]
    certificates.rotate()
    assert [has_changed(at_s) for at_s in (30, 60)] == [True, False]
