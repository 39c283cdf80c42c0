"""The commands that work on whole corpora and models, one file each; `acgpt.cli` holds those that ask a question."""
