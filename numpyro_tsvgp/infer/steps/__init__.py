"""What one E-step and one M-step are: rules, objectives, and the model they meet."""
