"""What is loaded into vLLM: `turn` in the API server process, `connector` in the engine and worker processes.

Nothing happens at import: no socket, thread or gRPC channel. Torch and vLLM are imported in `connector` only;
the servers' own packages (redis, fastapi) nowhere.
"""
