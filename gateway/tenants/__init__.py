"""API keys of tenants, and their limits."""
