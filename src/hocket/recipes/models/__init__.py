"""The models that recipes name, as plain `torch.nn.Module`s.

May import `recipes.config` and `recipes.data`, never `recipes.training`. Begin with
`make`, which builds the model that a recipe describes, and the heads of two views.
"""
