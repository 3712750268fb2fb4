"""Architectures of other people's libraries, in small, each with a batch of 4.

Imports nothing of a library before an architecture of it is asked for. Begin with
`entries.py`.
"""
