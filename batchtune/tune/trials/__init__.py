"""The trial: what was asked for, the points of the space, how long a run lasts, what came of it, why it failed."""
