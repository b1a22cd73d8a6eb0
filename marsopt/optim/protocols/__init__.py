"""What corrections ask of the optimizer beside their step."""
