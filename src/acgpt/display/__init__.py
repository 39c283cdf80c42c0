"""Answers and procedures for people: colours on a terminal, and pictures."""
