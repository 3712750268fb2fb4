"""Writes the page of what hocket is tested with, from the tests' own tables.

`python -m tests.tested_with.page` writes docs/reference/tested-with.md. `rows` names
the tests; `count` counts their cases without running them.
"""
