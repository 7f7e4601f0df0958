"""One module a chapter: the checkers of its exercises, in a dictionary ``CHECKS``."""
