"""The data of recipes, as `hocket.run.data.samples.Samples`.

May import `recipes.config`, never the other rooms of `recipes`. Begin with `load`,
which calls the function that a recipe names; `digits` reads what ships with
scikit-learn.
"""
