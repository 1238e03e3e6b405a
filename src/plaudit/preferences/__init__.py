"""Who preferred what: the store of comparisons and labels, and the sources that fill it."""
