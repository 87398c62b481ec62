"""Formats of stored KV, as in docs/project/formats.md: names, block files, manifests. Pure."""
