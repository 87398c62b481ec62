"""The way out: what is saved while a request runs and at its end, copied, then handed over to the sidecar."""
