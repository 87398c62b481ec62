"""How bytes travel: gRPC channels and servers, TLS, tracing. No word of a session."""
