"""Simulates a server, fitted to a few measurements, and predicts it under other parameters or traffic.

`calibrate` makes a `twin.Twin`: several sets of the server's parameters ("readings") that fit the measurements.
Start with `calibrate.calibrate`, `twin.Twin.predict`, `replicas.Replicas.plan`.
"""
