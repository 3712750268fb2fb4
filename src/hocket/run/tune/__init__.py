"""Decides before the first step: cut, order, costs, prediction.

`build.py` takes a model to a plan; `dry_run.py` plays a few steps to measure; the rest
chooses orders and answers `hocket.plan`. Imports `run.engine` and what is before it.
Begin with `build.py`.
"""
