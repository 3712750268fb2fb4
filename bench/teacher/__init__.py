"""A teacher and its student on two workers: the filled order beside its rivals."""
