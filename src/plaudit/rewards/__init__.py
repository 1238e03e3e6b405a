"""Sources of an answer's score."""
