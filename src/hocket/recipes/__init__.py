"""Complete trainings, described by one TOML file each.

Each imports only those before it: `config` (the file) < `data` (readers) < `models` <
`objectives` < `two_views` < `training`; `builtin/` has the recipes that come along.
May import everything but `hocket.cli`. Begin reading with `config/recipe.py`.
"""
