"""From a NumPyro model to its GPs, its likelihood and what is known about both."""
