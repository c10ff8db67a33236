"""The trial: its request, the points of the space, how long a run lasts, its result, why it failed."""
