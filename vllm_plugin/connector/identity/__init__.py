"""What KV was computed with: weights, adapters, settings, groups of layers. KV that differs in any is never loaded."""
