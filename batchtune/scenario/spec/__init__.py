"""The keys that a scenario may have, and the values that each of them may take."""
