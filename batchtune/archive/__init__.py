"""Where a run is kept, and what is left of it after a crash.

    results/<name>/<UTC>-<id>/
        scenario.yaml            as run
        provenance.json          on what it ran
        trials.jsonl             the ledger, the single truth: one line a trial, on disk before the next one starts
        samples/NNNN.parquet     every request of trial NNNN, written before its line
        search.json              what the search says of itself, written when it ends
        recommendation.json, batching_parameters.txt
        report.html              the run as a page
        server.log               what the launched server said, its start and its end
        lock                     held by the process that measures, with its pid

Whole files appear complete or not at all (written beside, synced, renamed). A line counts once its newline is there:
a run killed at any instant loses at most the trial in flight, and the next append cuts the torn line off.

Out go files. Start with `run.create_run`, `run.Run.append`, `run.open_run`.
"""
