"""The server: one scheduler for many users, and the protocols that editors and clients speak."""
