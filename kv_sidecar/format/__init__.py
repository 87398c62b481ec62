"""The formats of what is stored, as docs/formats.md has them: names, block files, manifests. Pure."""
