"""What `hocket.core.check` is made of; begin with `faults`.

faults: the ops are those that the program wants    play: every lane comes to its end
"""
