"""Teachers of recipes: their weights, two views, k-NN.

May import `recipes.config`, `recipes.data`, `recipes.models`, `hocket.teacher` and
`hocket.run`, never `recipes.training`. Begin with `weights`, which loads a frozen
teacher; `recipes.training.task` makes what a section [teacher] says.
"""
