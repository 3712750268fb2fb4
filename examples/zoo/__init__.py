"""Models, data sets and scores that the built-in recipes name.

May import hocket and any library. A file for each task; begin with `pictures.py`, the
data of images, and `vision.py`, the models for them.
"""
