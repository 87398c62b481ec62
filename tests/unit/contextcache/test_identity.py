"""Signed tokens say what they said and nothing else."""

import base64
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.errors import ForgedIdentity
from contextcache.identity import (
    Identity,
    KVTransfer,
    Standby,
    cache_salt,
    sign_identity,
    sign_kv_transfer,
    verify_kv_transfer,
)
from contextcache.model import ContextMode, UsageFormat
from tests.kit.identities import verify_identity

SECRET = b"a-secret-for-tests-only-32-bytes!"
IDENTITY = Identity("demo", "req-1", expires_at_ms=2000, session_id="s")
TRANSFER = KVTransfer("demo", "s", "req-1", load=("ref_1",), save="ref_2", expires_at_ms=5)


def test_a_signed_identity_is_read_back():
    assert verify_identity(sign_identity(IDENTITY, SECRET), SECRET, now_ms=1999) == IDENTITY


@pytest.mark.parametrize("mode", ContextMode)
def test_a_keys_own_context_mode_is_read_back_and_without_one_the_token_is_what_it_always_was(mode):
    signed = sign_identity(replace(IDENTITY, context_mode=mode), SECRET)
    body = sign_identity(IDENTITY, SECRET).split(".")[1]

    assert verify_identity(signed, SECRET, now_ms=0).context_mode is mode
    assert sorted(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))) == [
        "expires_at_ms",
        "request_id",
        "session_id",
        "tenant",
    ]


@pytest.mark.parametrize("usage", UsageFormat)
def test_how_a_keys_usage_counts_is_read_back(usage):
    signed = sign_identity(replace(IDENTITY, usage=usage), SECRET)

    assert verify_identity(signed, SECRET, now_ms=0).usage is usage


def test_the_pod_that_stands_by_is_read_back():
    signed = replace(IDENTITY, standby=Standby("pod-b", "https://10.0.0.2:8000", "10.0.0.2:1", "10.0.0.1:1"))

    assert verify_identity(sign_identity(signed, SECRET), SECRET, now_ms=0) == signed


def test_a_signed_kv_transfer_is_read_back():
    assert verify_kv_transfer(sign_kv_transfer(TRANSFER, SECRET), SECRET) == TRANSFER


def test_an_identity_ends_at_its_expiry():
    with pytest.raises(ForgedIdentity):
        verify_identity(sign_identity(IDENTITY, SECRET), SECRET, now_ms=2000)


def test_another_secret_is_refused():
    with pytest.raises(ForgedIdentity):
        verify_identity(sign_identity(IDENTITY, SECRET), SECRET + b"x", now_ms=0)


def test_an_empty_secret_signs_nothing():
    with pytest.raises(ForgedIdentity):
        sign_identity(IDENTITY, b"")


def test_a_token_made_for_one_use_is_refused_for_the_other():
    """An order for KV has every field of an identity: without the purpose in its MAC it would be one."""
    with pytest.raises(ForgedIdentity, match="signature"):
        verify_identity(sign_kv_transfer(TRANSFER, SECRET), SECRET, now_ms=0)
    with pytest.raises(ForgedIdentity, match="signature"):
        verify_kv_transfer(sign_identity(IDENTITY, SECRET), SECRET)


@given(st.integers(0, 500), st.integers(1, 255))
def test_a_token_with_any_byte_changed_is_refused(position, change):
    token = sign_identity(IDENTITY, SECRET)
    position %= len(token)
    changed = token[:position] + chr(ord(token[position]) ^ change) + token[position + 1 :]

    with pytest.raises(ForgedIdentity):
        verify_identity(changed, SECRET, now_ms=0)


@given(st.text(max_size=200))
def test_any_text_is_refused_without_a_crash(token):
    with pytest.raises(ForgedIdentity):
        verify_identity(token, SECRET, now_ms=0)


def test_the_cache_salt_tells_tenants_and_models_apart_and_fits_vllm():
    salts = {cache_salt(tenant, model, SECRET) for tenant in ("a", "b") for model in ("m", "n")}

    assert len(salts) == 4
    assert all(salt.isalnum() and len(salt) == 64 for salt in salts)


def test_a_boundary_between_tenant_and_model_cannot_be_moved():
    assert cache_salt("a", "bc", SECRET) != cache_salt("ab", "c", SECRET)


def test_orders_to_save_lost_kv_again_are_read_back_and_older_orders_have_none():
    order = KVTransfer("demo", "s", "req-1", load=("ref_1",), save=None, expires_at_ms=5, save_again_tokens=9)

    assert verify_kv_transfer(sign_kv_transfer(order, SECRET), SECRET) == order
    assert verify_kv_transfer(sign_kv_transfer(TRANSFER, SECRET), SECRET).save_again_tokens == 0
