"""Language models, heads and the ways in which four roles share weights."""
