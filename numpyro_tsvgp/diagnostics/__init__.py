"""What a fit looks like from outside: ArviZ objects, leave-one-out scores, calibration."""
