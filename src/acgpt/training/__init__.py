"""Training and fine-tuning: from a recipe to a run folder with checkpoints, log and results."""
