"""Output for people: coloured terminal output, tables and pictures."""
