"""Transport between processes: gRPC channels and servers, TLS, tracing. It knows no session."""
