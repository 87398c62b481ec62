"""KV bytes beside one vLLM pod: stores, verifies, shares, expires and hands out blocks.

Read `catalog.py` first. `saving.py` is the way in; `format/` what a file holds, `tiers/` where files are on this pod,
`sealed/` what is known of them, `moving/` how KV gets from pod to pod, `shared/` the store of all pods. What does not
belong here: torch, vLLM, sessions, transcripts. Other packages enter by `client.py` only.
"""
