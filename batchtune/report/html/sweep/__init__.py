"""The page of a sweep: `account` is what it says, the other files draw it."""
