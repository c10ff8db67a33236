"""What would the server do under other parameters or other traffic? Calibrated from a few measurements.

Out goes `model.twin.Twin`: draws of the server's parameters that all agree with what was measured.
Start with `calibration.calibrate.calibrate`, `model.twin.Twin.predict`, `model.replicas.Fleet.plan`.
"""
