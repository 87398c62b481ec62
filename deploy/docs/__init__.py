"""What the pages in docs/ take from code and from measured results: settings, metrics, figures.

A page marks the place: `<!-- generated: settings GATEWAY_ -->`, the text, `<!-- /generated -->`.
`python -m deploy.docs` writes what stands between; the rest of a page is written by hand and left alone.
"""
