"""Data on their way to an update: loaders, devices, hosts."""
