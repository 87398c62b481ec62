"""The formats of what is stored, as docs/project/formats.md has them: names, block files, manifests. Pure."""
