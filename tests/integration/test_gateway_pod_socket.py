"""Connections to pods notice a peer that is gone; seen failing without `socket_factory`."""

import socket

from aiohttp import web

from gateway.http.carrier import SILENT_S, UNCONFIRMED_MS, carrier_session


async def test_a_connection_to_a_pod_asks_whether_it_is_there_and_waits_for_no_confirmation_for_ever():
    app = web.Application()
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with (
            carrier_session(connect_timeout_s=5, idle_timeout_s=5) as session,
            session.get(f"http://127.0.0.1:{port}/") as answer,
        ):
            connection = answer.connection.transport.get_extra_info("socket") if answer.connection else None
            if connection is None:  # the answer was whole at once: its connection waits for the next request
                (((protocol, _), *_),) = session.connector._conns.values()
                connection = protocol.transport.get_extra_info("socket")
            kept = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            silent_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            unconfirmed_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            at_once = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        await runner.cleanup()

    assert (kept, silent_s, unconfirmed_ms, at_once) == (1, SILENT_S, UNCONFIRMED_MS, 1)
