"""How KV gets from pod to pod: pulled for a turn, handed over by a pod that ends, taken over by one that starts.

Read `pulling.py` first.
"""
