"""Judges that stand outside training, and what they make of a model."""
