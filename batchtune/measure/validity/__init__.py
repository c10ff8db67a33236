"""May a measurement be believed? Client, host, steady state, and the closed list of caveats."""
