"""The turn, run inside vLLM's API server: lease, transcript, answer, usage, commit.

Read `story.py` first. What belongs here: everything between a signed request and the committed turn. What does
not: KV bytes (the connector's), routing (the gateway's), and any import of vllm or torch: the engine is used
through its own HTTP surface, called in process (`engine.py`).
"""
