"""KV bytes beside one vLLM pod: stores, verifies, shares, expires and hands out blocks.

Read `catalog.py` first. What belongs here: block files, manifests, tiers. What does not: torch, vLLM, sessions,
transcripts. Other packages enter by `client.py` only.
"""
