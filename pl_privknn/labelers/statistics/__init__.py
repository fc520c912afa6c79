"""Teachers that release statistics of the private records once, and make a model of them by public data."""
