"""Whether a measurement may be believed: client, host, steady state, and the closed list of caveats."""
