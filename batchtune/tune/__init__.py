"""What else should be tried? Asks, trials, evidence, and when it is enough.

Out goes `trials.trial.Trial`, one by one, as each ends. `policy` holds every hand-set number.
Start with `sweep.sweep.sweep`, `bench.Bench.run`, `sweep.dispatch.strategy_of`.
"""
