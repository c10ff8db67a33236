"""Parameters that would have shown what was measured, and how well a trial left out is predicted."""
