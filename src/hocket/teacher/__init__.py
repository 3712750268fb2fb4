"""What is special to teachers: losses, views of images, evaluation of features.

Torch only. May import `hocket.errors` and `hocket.run.data`, and nothing of the engine.
Begin with `losses`, whose functions a `Pipeline` with teachers takes as its loss;
`views` makes the batches of two views that some of them need.
"""
