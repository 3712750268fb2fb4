"""The nouns and the rules: what is to be done, in which order, and is it right."""
