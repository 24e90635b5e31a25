"""Explain what a vision-language model writes: maps of a token, of an answer, and of each of its words."""
