"""The TCP socket to a pod: it notices a pod whose node is gone without a word.

The kernel answers for a pod that is merely busy, so nothing here cuts off a long answer. deploy/envoy/clusters.py has
the same times for Envoy.
"""

from __future__ import annotations

import socket

from aiohttp import AddrInfoType

SILENT_S = 10
"""Silence after which the peer's kernel is asked whether it is there."""
ASK_AGAIN_S = 3
QUESTIONS_MAX = 3
UNCONFIRMED_MS = 15_000
"""Longest time that bytes may stay unconfirmed."""


def open_pod_socket(address: AddrInfoType) -> socket.socket:
    """Return an unconnected socket for `address`, as aiohttp's `socket_factory` wants it."""
    family, kind, _, _, _ = address
    # By name, not 0: asyncio turns Nagle's algorithm off only for a socket that says it is TCP.
    opened = socket.socket(family, kind, socket.IPPROTO_TCP)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_AGAIN_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, QUESTIONS_MAX)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNCONFIRMED_MS)
    return opened
