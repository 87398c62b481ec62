"""The console: a page for people, over the public HTTP API alone. Static files and the headers they are served with.

No data of anybody's is in them, and nothing here knows a tenant: whoever opens the page types a key into it.
"""
