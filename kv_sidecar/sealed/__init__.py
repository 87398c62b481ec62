"""Sealed contexts: the manifests' files, their index, and the search by the beginning of a prompt. Holds no KV."""
