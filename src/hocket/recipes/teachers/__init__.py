"""Teachers of recipes: their weights, the student's loss, two views, k-NN.

May import `recipes.config`, `recipes.data`, `recipes.models`, `hocket.teacher` and
`hocket.run`, never `recipes.training`. Begin with `make`, which makes what a section
[teacher] says.
"""
