"""Pages: labelling, two models side by side, a run as it goes, one answer token by token."""
