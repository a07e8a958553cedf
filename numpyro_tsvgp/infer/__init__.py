"""Guides, rules, objectives and the drivers that fit them."""
