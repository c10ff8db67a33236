"""How do we ask: who sends what when, and when did the answer come?

Out goes `record.samples.Samples`: each request's due, send and answer times, and its outcome.
Start with `fleet.LoadFleet`, `worker.driver`, `calibration.calibrate`.
"""
