"""The images, built without a Docker engine: `make images`. The Dockerfiles work with any builder all the same.

What belongs here: what goes into an image and how it is built, looked at and described. What does not: how a part is
started, which the chart says.
"""
