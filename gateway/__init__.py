"""The gateway finds the tenant, the context, its KV and a ready pod for each request. Read `flows.py` first.

The pod does everything of a turn: leases, transcripts, tokens and usage.
"""
