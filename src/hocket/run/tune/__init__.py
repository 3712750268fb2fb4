"""Decides before the first step: cut, order, costs, prediction.

`build.py` makes a plan from a model, which `cut/` profiles and cuts; `dry_run.py` runs
a few steps to measure; the rest chooses orders and implements `hocket.plan`. Imports
`run.engine` and what is before it. Begin with `build.py`.
"""
