"""Choose: balance stages, rank candidates."""
