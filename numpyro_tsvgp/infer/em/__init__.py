"""Drivers: the iteration, its start, the run around it, and what is said when it fails."""
