"""Corpora: from text files to shards of token ids, and back to sequences."""
