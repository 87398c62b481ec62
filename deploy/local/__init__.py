"""The local stack: every part as a real process on loopback, installed, started, watched and stopped.

What belongs here: how one machine runs the whole project, and the story told on it. What does not: anything the
parts themselves need to know; they are configured from outside, as on a cluster.
"""
