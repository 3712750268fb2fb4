"""Readers of the files that data sets come in: each gives `Samples`.

Nothing is downloaded. A reader checks what it is given and says what is wrong with the
path, the line or record, what was expected, and where the files are to be had.
"""
