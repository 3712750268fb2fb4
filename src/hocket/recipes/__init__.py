"""Complete trainings, described by one TOML file each.

Rooms, each importing only those before it: `config` (the file) < `data` (readers) <
`models` < `teachers` < `training`; `builtin/` has the recipes that come with hocket.
May import everything but `hocket.cli`. Begin reading with `config/recipe.py`.
"""
