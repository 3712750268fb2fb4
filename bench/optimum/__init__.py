"""How far each schedule is from the best order there can be."""
