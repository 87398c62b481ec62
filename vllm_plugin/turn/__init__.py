"""The turn, in a process beside vLLM: lease, transcript, answer, usage, commit.

Read `story.py` first. Content: everything between a signed request and the committed turn. Not here: KV bytes (the
connector), routing (the gateway), and imports of vllm or torch. The engine is used through its own HTTP routes
(`engine.py`, `forwarding.py`).
"""
