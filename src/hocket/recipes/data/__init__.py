"""Readers of data sets' files; each returns `hocket.run.data.samples.Samples`.

May import `recipes.config`, never the other rooms of `recipes`. Nothing is downloaded:
a reader that refuses a file names its path and line, what it expected, and where to
get the files. Begin with `load`, which calls the reader that a recipe names.
"""
