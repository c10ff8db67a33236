"""A simulator of the server, fitted to a few measurements: what it would do under other parameters or traffic.

Out goes `model.twin.Twin`: draws of the server's parameters that all agree with what was measured.
Start with `calibration.calibrate.calibrate`, `model.twin.Twin.predict`, `model.replicas.Replicas.plan`.
"""
