"""Tests, in the folders of the rooms that they guard; imported as `tests.…` from the root."""
