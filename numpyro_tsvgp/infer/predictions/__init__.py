"""What a fit says about new inputs: data in their own units, functions, predictors."""
