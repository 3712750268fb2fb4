"""What the documents say is so.

`blocks` reads their code; `shell` knows their commands. Begin with `test_blocks.py`.
"""
