"""The twin: which server is meant, what it does under given traffic, how much it can take."""
