"""Code shared by all packages: atomic file writes, provenance of results, declaration of options."""
