"""What is sealed: the manifests' files, the index over them, and which of it a prompt begins like. Holds no KV."""
