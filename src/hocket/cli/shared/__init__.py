"""What several commands share: options, files, tables, a line of progress.

Imports what commands import, and no command. Begin with `options.py`.
"""
