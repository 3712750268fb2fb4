"""Recipes as configuration: TOML files, `--set`, defaults, and validation.

May import the planning half of hocket (`core`, `schedules`, `planner`), never torch
and no other room of `recipes`. Begin with `recipe`, which lists the sections and keys;
`resolve` reads a file into it and reports all faults at once.
"""
