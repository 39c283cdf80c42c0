"""Grids of training runs as independent cells, and the experiments that come with acgpt."""
