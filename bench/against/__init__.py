"""Step times of this checkout beside those of another one."""
