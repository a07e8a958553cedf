"""Fits that take in new data, give up old ones, and look ahead."""
