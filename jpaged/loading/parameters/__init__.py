"""Maps each checkpoint tensor to a parameter, its format and its devices."""
