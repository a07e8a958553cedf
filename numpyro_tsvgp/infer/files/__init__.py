"""Fits, predictors and checkpoints in files."""
