"""Options of gRPC's channels and servers that others' reports made necessary (tests/README.md)."""

from contextcache.wire.rpc import CHANNEL_OPTIONS
from contextcache.wire.servers import SERVER_OPTIONS


def test_a_server_permits_pings_as_often_as_its_clients_send_them():
    """Else it answers `too_many_pings`, and every call on the connection fails."""
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)

    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert client["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == 1


def test_no_channel_of_ours_goes_through_a_proxy():
    """gRPC reads `https_proxy` and `http_proxy` by itself, for loopback too."""
    assert dict(CHANNEL_OPTIONS)["grpc.enable_http_proxy"] == 0
