"""What a part does with its certificate files: tried out at the start, followed afterwards, never worse than before."""

from __future__ import annotations

import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from contextcache.process.settings import TlsFiles, TlsSettings
from contextcache.wire.tls import WatchedTls, carries_name, open_tls
from tests.kit.certificates import NAME, CertificateFiles, chain_of


class Seconds:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def certificates(tmp_path):
    return CertificateFiles(tmp_path / "tls")


def contents(files: TlsFiles) -> tuple[bytes, bytes, bytes]:
    return files.cert_file.read_bytes(), files.key_file.read_bytes(), files.ca_file.read_bytes()


def test_good_files_say_when_they_end(certificates):
    certificates.rotate(days=30)

    found = WatchedTls(certificates.files).current()

    days = (datetime.fromtimestamp(found.expires_at_s, UTC) - datetime.now(UTC)) / timedelta(days=1)
    assert 29.9 < days < 30.1
    assert (found.certificate, found.key, found.ca) == contents(certificates.files)


def test_without_files_there_is_no_tls():
    assert open_tls(None) is None


@pytest.mark.parametrize("missing", ["cert_file", "key_file", "ca_file"])
def test_a_missing_file_is_named(certificates, missing):
    path = getattr(certificates.files, missing)
    path.unlink()

    with pytest.raises(OSError, match=path.name):
        WatchedTls(certificates.files)


def _other_key(certificates):
    certificate, _, ca = contents(certificates.files)
    return certificate, certificates.ca.issue_cert(NAME).private_key_pem.bytes(), ca


def _encrypted_key(certificates):
    certificate, key, ca = contents(certificates.files)
    loaded = serialization.load_pem_private_key(key, None)
    encryption = serialization.BestAvailableEncryption(b"password")
    formats = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    return certificate, loaded.private_bytes(*formats, encryption), ca


def _no_certificate(certificates):
    _, key, ca = contents(certificates.files)
    return b"nonsense", key, ca


def _no_ca(certificates):
    certificate, key, _ = contents(certificates.files)
    return certificate, key, b"nonsense"


def _foreign_ca(certificates):
    certificate, key, _ = contents(certificates.files)
    return certificate, key, trustme.CA().cert_pem.bytes()


def _other_name(certificates):
    certificates.rotate(name="somebody-else")
    return contents(certificates.files)


def _expired(certificates):
    certificates.rotate(days=-1)
    return contents(certificates.files)


def _for_servers_only(certificates):
    """What cert-manager signs when it is asked for `server auth` alone."""
    key, ca_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)

    def named(name):
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def signed(name, public_key, *extensions):
        builder = x509.CertificateBuilder().subject_name(named(name)).issuer_name(named("ca")).public_key(public_key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
        builder = builder.not_valid_after(now + timedelta(days=1))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    certificate = signed(
        "part",
        key.public_key(),
        x509.SubjectAlternativeName([x509.DNSName(NAME)]),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
    )
    ca = signed("ca", ca_key.public_key(), x509.BasicConstraints(ca=True, path_length=None))
    formats = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    return certificate, key.private_bytes(*formats, serialization.NoEncryption()), ca


BAD = {
    _other_key: "tls.key are not a PEM certificate and its private key",
    _encrypted_key: "the TLS private key is encrypted",
    _no_certificate: "tls.crt",
    _no_ca: "ca.crt has no PEM certificate",
    _foreign_ca: "other parts would reject .*tls.crt: ",
    _other_name: "other parts would reject .*'context-cache'",
    _expired: "certificate has expired",
    _for_servers_only: "unsuitable certificate purpose",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_files_that_cannot_serve_are_refused_with_the_reason(certificates, spoil):
    spoilt = spoil(certificates)
    certificates.replace(*spoilt)

    with pytest.raises(ValueError, match=BAD[spoil]) as refused:
        WatchedTls(certificates.files)
    assert "PRIVATE" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("spoil", [_no_certificate, _foreign_ca], ids=lambda spoil: spoil.__name__)
def test_a_broken_change_is_counted_and_the_last_good_files_stay_until_there_are_better(certificates, spoil):
    """Files are read again as test_reloaded.py says."""
    clock, failures = Seconds(), []
    tls = WatchedTls(certificates.files, on_failure=lambda: failures.append(clock.now), monotonic_s=clock)
    before = tls.current()

    certificates.replace(*spoil(certificates))
    clock.now += 1
    assert tls.current() is before
    assert failures == [1.0]

    certificates.rotate(days=60)
    clock.now += 1
    assert tls.current().expires_at_s > before.expires_at_s
    assert tls.current().certificate == contents(certificates.files)[0] != before.certificate
    assert failures == [1.0]


@pytest.mark.parametrize("changed", ["cert_file", "key_file", "ca_file"])
def test_each_of_the_files_is_followed(certificates, tmp_path, changed):
    """Seen failing with the file of the CA left out of those that are looked at."""
    before, clock, failures = certificates.files, Seconds(), []
    for name in ("cert_file", "key_file", "ca_file"):
        (tmp_path / name).write_bytes(getattr(before, name).read_bytes())
    files = TlsFiles(tmp_path / "cert_file", tmp_path / "key_file", tmp_path / "ca_file", NAME)
    tls = WatchedTls(files, on_failure=lambda: failures.append(clock.now), monotonic_s=clock)
    (tmp_path / changed).write_bytes(b"nonsense")
    clock.now += 1

    assert tls.current().certificate == before.cert_file.read_bytes()
    assert failures == [1.0]


def test_an_intermediate_ca_is_enough_to_believe(certificates, tmp_path):
    intermediate = trustme.CA(parent_cert=trustme.CA())
    leaf = intermediate.issue_cert(NAME)
    # As cert-manager writes them: the chain below the root, and the issuer's own certificate.
    chain = chain_of(leaf)
    certificates.replace(chain, leaf.private_key_pem.bytes(), intermediate.cert_pem.bytes())

    assert WatchedTls(certificates.files).current().certificate == chain


@pytest.mark.parametrize(
    ("certificate", "expected"),
    [
        ({"subjectAltName": (("DNS", "x"), ("DNS", NAME))}, True),
        ({"subjectAltName": (("URI", NAME), ("DNS", f"{NAME}.evil"), ("DNS", "*"))}, False),
        ({"subject": ((("commonName", NAME),),)}, False),
        ({}, False),
        (None, False),
    ],
)
def test_only_a_dns_name_makes_a_certificate_one_of_ours(certificate, expected):
    assert carries_name(certificate, NAME) is expected


def test_the_name_in_the_certificates_is_the_operators_to_choose(tmp_path):
    certificates = CertificateFiles(tmp_path / "tls", name="parts.example")

    settings = TlsSettings(**certificates.settings, tls_server_name="parts.example")

    assert WatchedTls(settings.tls).current().certificate
    with pytest.raises(ValueError, match="context-cache"):
        WatchedTls(TlsSettings(**certificates.settings).tls)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("no_ticket", [0, ssl.OP_NO_TICKET], ids=["ticket", "session id"])
def test_who_was_let_in_by_a_ca_before_is_not_let_in_again_by_what_it_kept(certificates, version, no_ticket):
    """Seen failing with a ticket of TLS 1.2: its key was that of a context that lived as long as the process."""
    clock = Seconds()
    tls = WatchedTls(certificates.files, monotonic_s=clock)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode, client.maximum_version = False, ssl.CERT_NONE, version
    client.options |= no_ticket
    certificates.ca.issue_cert(NAME).configure_cert(client)
    session = through(client, tls).session
    certificates.ca = trustme.CA()
    certificates.rotate()
    clock.now += 2

    for kept in (session, None):
        with pytest.raises(ssl.SSLError):
            through(client, tls, session=kept)


def through(client, tls, *, session=None):
    """Shake hands in memory, and have each side read what the other one wrote."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=NAME, session=session)
    sides = [asking, tls.server_context(require_clients=True).wrap_bio(to_server, to_client, server_side=True)]
    steps = [side.do_handshake for side in sides] + [lambda: sides[1].write(b"hi"), lambda: asking.read(2)]
    for _ in range(20):
        with suppress(ssl.SSLWantReadError):
            while steps:
                steps[0]()
                steps.pop(0)
        steps = steps[1:] + steps[:1]
    return asking
