"""The store that all pods of a release share: what is in it, how KV gets there and leaves. Read `writer.py` first."""
