"""Queries: tokens and their roles, the template language, conditioning sets and evaluation modes."""
