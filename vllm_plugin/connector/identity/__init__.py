"""Identity of KV: its weights, adapters, settings and groups of layers. KV that differs in any is never loaded."""
