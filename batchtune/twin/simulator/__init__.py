"""Simulates servers with their schedulers under given traffic; compiled, and independent of measurements."""
