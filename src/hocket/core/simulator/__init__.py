"""What `simulate` is made of, in the order in which a schedule passes through.

columns ──▶ values ──▶ messages ──▶ work ──▶ in_order  ──▶ memory
ops as      what each  what goes    plain    or events     bytes over
numbers     op needs   where        lists    (the clock)   time
"""
