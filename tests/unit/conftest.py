"""Unit tests open no network connection and listen on no port. Valkey answers them on a Unix socket."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, method, _refusing(getattr(socket.socket, method)))


def _refusing(method: Any) -> Any:
    def refuse(self: socket.socket, *address: object) -> Any:
        if self.family != socket.AF_UNIX:
            raise AssertionError("a unit test used the network: it belongs in tests/integration")
        return method(self, *address)

    return refuse
