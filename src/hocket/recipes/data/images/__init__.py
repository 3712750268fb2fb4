"""Readers of image data sets, and what they do to images.

May import the files of `recipes.data` and `recipes.config`. Begin with
`image_folder.py`; `image_tensors.py` normalises, shifts and mirrors.
"""
