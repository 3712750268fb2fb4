"""Networks and results of published experiments, as packaged data with its readers.

`networks.toml` names the networks that `hocket plan` knows, `catalogue` reads it;
`*.json` are what `hocket bench` shows, `results` reads them and `bench/` writes them.
May import `hocket.core` and `hocket.planner`. Begin with `catalogue`.
"""
