"""The load: who sends what when, and when the answer came.

Produces `samples.Samples`: each request's due, send and answer times, and its outcome.
Start with `fleet.LoadFleet`, `worker_process.Driver`, `calibration.calibrate`.
"""
