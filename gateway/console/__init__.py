"""The console: a page for people. It calls the public HTTP API with the key that its user types.

The static files hold no data, and this package knows no tenant.
"""
