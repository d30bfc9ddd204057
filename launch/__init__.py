"""Start what a recipe describes: check the machine, then serve, train, or hand the environment to Ray."""
