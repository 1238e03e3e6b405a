"""The composition of the pages, as recipes is that of the stages. What shows a run does without torch."""
