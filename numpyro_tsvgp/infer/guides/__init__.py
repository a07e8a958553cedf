"""Guides of GPs, and of the hyperparameters beside them."""
