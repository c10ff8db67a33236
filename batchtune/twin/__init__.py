"""Simulates a server, fitted to a few measurements, and predicts it under other parameters or traffic.

`calibration` makes a `model.twin.Twin`: several sets of the server's parameters ("readings") that fit the measurements.
Start with `calibration.calibrate.calibrate`, `model.twin.Twin.predict`, `model.replicas.Replicas.plan`.
"""
