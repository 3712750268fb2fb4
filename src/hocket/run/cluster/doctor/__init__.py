"""`hocket doctor`: checks for what stops jobs before their first step.

Imports `run.diagnostics` and the other files of `run.cluster`. Begin with `examine.py`;
`finding.py` has the result of one check.
"""
