"""`hocket doctor`: checks for what stops jobs before their first step."""
