"""LMCache: in the place of connector and kv-sidecar (ADR 0064), or over a kv-sidecar as its second tier."""
