"""Which peers are allowed, and what is known of the engine beside a sidecar."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kv_sidecar.moving.pulling import EngineRanks, PeerRules
from kv_sidecar.settings import SidecarSettings

A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("entry", "address"),
    [
        ("10.1.2.3:50061", "10.1.2.3:50061"),
        ("10.1.2.3", "10.1.2.3:1"),
        ("10.1.0.0/16", "10.1.2.3:50061"),
        ("Engine-1.pods:50061", "engine-1.Pods:50061"),
        ("engine-1.pods", "engine-1.pods:50061"),
        ("[fd00::1]:50061", "[fd00::1]:50061"),
        ("fd00::/64", "[fd00::1]:50061"),
        ("*", "anything.at.all:65535"),
    ],
)
def test_a_listed_peer_is_allowed(entry: str, address: str) -> None:
    assert PeerRules([entry]).allow(address)


@pytest.mark.parametrize(
    ("entry", "address"),
    [
        ("10.1.2.3:50061", "10.1.2.3:50062"),
        ("10.1.2.3", "10.1.2.33:50061"),
        ("10.1.0.0/16", "10.2.0.1:50061"),
        ("10.1.0.0/16", "10.1.0.1.evil.example:50061"),
        ("10.0.0.0/8", "[::ffff:10.0.0.1]:50061"),
        ("engine-1", "engine-1.evil.example:50061"),
        ("*", "10.1.2.3"),
        ("*", "unix:///run/x.sock"),
        ("*", "ipv4:10.0.0.1:1"),
        ("*", "dns:///x:1"),
        ("*", "x:65536"),
        ("*", "x:1\n"),
        ("*", "-x:1"),
        ("*", ""),
    ],
)
def test_any_other_address_is_not(entry: str, address: str) -> None:
    assert not PeerRules([entry]).allow(address)


def test_without_a_list_nobody_is_allowed() -> None:
    assert not PeerRules([]).allow("127.0.0.1:50061")


@pytest.mark.parametrize("entry", ["", "10.0.0.1/8", "http://x", "x:port", "unix:x"])
def test_an_entry_that_is_no_peer_stops_the_start(entry: str) -> None:
    with pytest.raises(ValidationError):
        SidecarSettings(peers=(entry,))


def test_the_list_is_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_PEERS", '["10.0.0.0/8", "engine-1:50061"]')

    assert SidecarSettings().peers == ("10.0.0.0/8", "engine-1:50061")


def test_ranks_are_listed_in_their_order() -> None:
    engine = EngineRanks()
    engine.introduce(1, 2, B, "")
    engine.introduce(0, 2, A, "")

    assert engine.fingerprints == [A, B]


def test_a_fingerprint_is_known_only_when_all_ranks_agree() -> None:
    engine = EngineRanks()
    before = engine.fingerprint
    engine.introduce(0, 2, A, "")
    engine.introduce(1, 2, B, "")
    differing = engine.fingerprint
    engine.introduce(1, 2, A, "")

    assert (before, differing, engine.fingerprint) == (None, None, A)


def test_another_number_of_ranks_is_another_engine() -> None:
    engine = EngineRanks()
    engine.introduce(0, 2, A, "")
    engine.introduce(1, 2, A, "")
    engine.introduce(0, 1, B, "")

    assert (engine.fingerprints, engine.world_size) == ([B], 1)
