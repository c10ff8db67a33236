"""Workers on several machines that send one job together.

1. A `host.Host` runs in a Ray actor and starts a local fleet of one process on one CPU. The load is sent by the
   same code and process as on one machine; the actor only waits. `ray` is imported in no process that sends.
2. The head, `cluster_fleet.ClusterFleet`, draws the schedule and splits it (`job.split`, as for local processes); each
   host connects.
3. Each worker's clock is compared with the head's (`host.read_clock`), and each gets the start in its own clock. Due,
   sent and done of a request are readings of one clock; only the start depends on two.
4. Every 0.25 s the head reads each worker's progress, sums it up for the view, and passes on a stop.
5. The clocks are compared again: one that moved by more than 1,000 ppm was set, and its worker is lost.
6. Samples come back through the object store, 500,000 rows at once, one worker after another; of more than 20 million
   requests only one in n, drawn at random by the worker.
7. A worker that is lost (`WorkerLostError`) makes the load void: `tune/loader` sends it again without that worker, and
   its measurement says so. Where one worker falls short and the others do not, the load is sent again as it was, and
   without that worker when it falls short again.

The overhead is in results/reference/README.md.
"""
