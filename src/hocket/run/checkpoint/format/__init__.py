"""The files of a checkpoint: manifest, parts, tensors, hashes, and their folder.

Begin with `manifest.py`; `opened.py` reads and checks a whole checkpoint.
Imports nothing of `run` outside of this folder.
"""
