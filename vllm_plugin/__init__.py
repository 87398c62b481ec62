"""The parts of a vLLM pod: `connector`, loaded into the engine and worker processes, and `turn`, a process beside vLLM.

Nothing happens at import: no socket, thread or gRPC channel. Torch and vLLM are imported in `connector` only, redis and
fastapi nowhere.
"""
