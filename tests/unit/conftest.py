"""Unit tests open no network connection and listen on no port."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, *_address: object) -> None:
        raise AssertionError("a unit test used the network: it belongs in tests/integration")

    for method in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, method, refuse)
