"""`context-cache ls`, `ask`, `top` and the like: the client of `contextcache.client` on a command line."""
