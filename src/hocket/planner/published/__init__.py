"""Networks and results of published experiments, as packaged data with its readers.

`networks.toml` has the networks that `hocket plan` knows, `*.json` are what `hocket
bench` shows; `catalogue` reads them. `bench/` writes them all.
May import `hocket.core` and `hocket.planner`. Begin with `catalogue`.
"""
