"""Stubs of Envoy's external processing protocol, trimmed: generated, see proto/contextcache/extproc."""
