"""The gateway: knows who is calling, which context, where its KV is and which pod is ready, and routes.

Read `flows.py` first. Whatever belongs to a turn (leases, transcripts, tokens, usage) happens in the pod, not here.
"""
