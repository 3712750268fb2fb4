"""What a captured graph has fixed: attributes, modes, hooks, globals, functions.

Imports `model.trace`. Begin with `guards.py`; `reached.py` finds what code reaches, and
`code_text.py` describes it as text, for what is kept between runs.
"""
