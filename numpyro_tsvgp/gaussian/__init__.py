"""Gaussian algebra: kernels become priors, sites become posteriors. Nothing of NumPyro is in it."""
