"""How does a sweep read as a page? `account` is what it says, `forecast` what the twin says beside it."""
