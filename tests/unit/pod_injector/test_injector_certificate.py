"""The webhook's certificate: followed when it changes, kept when the new one is broken."""

from __future__ import annotations

import datetime as dt
import ssl
from contextlib import suppress

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from prometheus_client import CollectorRegistry

from pod_injector.metrics import InjectorMetrics
from pod_injector.server import open_certificate

END = dt.datetime(2099, 1, 2, tzinfo=dt.UTC)


@pytest.fixture
def metrics():
    return InjectorMetrics(CollectorRegistry())


@pytest.fixture
def files(tmp_path):
    files = (tmp_path / "tls.crt", tmp_path / "tls.key")
    issue(files)
    return files


def issue(files, *, not_after=END):
    made = trustme.CA().issue_cert("cc-injector.llm.svc", not_after=not_after)
    files[0].write_bytes(made.cert_chain_pems[0].bytes())
    made.private_key_pem.write_to_path(str(files[1]))


def value(metrics, name):
    return metrics.registry.get_sample_value(f"contextcache_injector_certificate_{name}")


def shown(certificate):
    """Return what the next handshake shows, as PEM."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = context.wrap_bio(to_client, to_server)
    waiting = [client, certificate.value.wrap_bio(to_server, to_client, server_side=True)]
    while waiting:
        for side in list(waiting):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
                waiting.remove(side)
    return ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True)).encode()


def test_a_certificate_says_when_it_ends(files, metrics):
    open_certificate(*files, metrics)

    assert value(metrics, "expiry_timestamp_seconds") == END.timestamp()


def test_new_files_are_read(files, metrics):
    certificate = open_certificate(*files, metrics)
    issue(files, not_after=END + dt.timedelta(days=1))

    assert certificate.look() is True
    assert value(metrics, "expiry_timestamp_seconds") == END.timestamp() + 86_400


@pytest.mark.parametrize("damage", ["text", "other key", "other certificate", "missing"])
def test_broken_files_are_counted_once_tried_again_and_not_used(files, metrics, tmp_path, damage):
    certificate = open_certificate(*files, metrics)
    good = [file.read_bytes() for file in files]
    if damage == "text":
        files[0].write_text("not a certificate")
    elif damage == "missing":
        files[0].unlink()
    elif damage == "other key":
        issue((tmp_path / "other.crt", files[1]))
    else:
        issue((files[0], tmp_path / "other.key"))

    assert [certificate.look(), certificate.look()] == [False, False]
    assert value(metrics, "reload_failures_total") == 1
    assert shown(certificate) == good[0]
    for file, content in zip(files, good, strict=True):
        file.write_bytes(content)
    assert certificate.look() is True


def test_nobody_is_asked_for_the_password_of_an_encrypted_key(files, metrics, capfd):
    certificate = open_certificate(*files, metrics)
    key = load_pem_private_key(files[1].read_bytes(), None)
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")))

    assert certificate.look() is False
    assert "pass phrase" not in "".join(capfd.readouterr())


def test_an_expired_certificate_is_refused_at_the_start(files, metrics):
    issue(files, not_after=dt.datetime(2001, 1, 1, tzinfo=dt.UTC))

    with pytest.raises(OSError, match="expired"):
        open_certificate(*files, metrics)


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_is_missing_is_named(number, files, metrics):
    files[number].unlink()

    with pytest.raises(FileNotFoundError, match=str(files[number])):
        open_certificate(*files, metrics)
