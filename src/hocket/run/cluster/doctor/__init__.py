"""`hocket doctor`: what stops people before their first step, and how to mend it."""
