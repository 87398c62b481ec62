"""Texts of documentation pages that come from code and results: settings, metrics, errors, commands, calls, figures.

A page marks the place: `<!-- generated: settings GATEWAY_ -->`, the text, `<!-- /generated -->`.
`python -m deploy.docs` writes what stands between; the rest of a page is written by hand and left alone.
"""
