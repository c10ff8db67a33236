"""Workers on several machines that send one job together.

1. A `ray_hosts.Station` runs in a Ray actor and starts a local fleet of one process on one CPU. What sends is the code
   and the process that sends at home; the actor only waits. `ray` is imported in no process that sends.
2. The head, `cluster_fleet.ClusterFleet`, draws the schedule and splits it (`job.split`, as for local processes); each
   station connects.
3. Each worker's clock is read against the head's (`host.read_clock`), and each is told the same start in its own clock.
   Due, sent and done of a request are readings of one clock; only the start rests on two.
4. Every 0.25 s the head asks how far each is, sums it up for the view, and passes on a stop.
5. The clocks are read again: one that moved by more than 1,000 ppm was set, and its worker is lost.
6. Columns come back through the object store, 500,000 rows at once, one worker after another; of more than 20 million
   requests one in so many, drawn at random where it was sent.
7. A worker that is lost (`WorkerLostError`) makes the load void: `tune/loader` sends it again without that worker, and
   its measurement says so. For one that falls short where others do not it is sent again as it was, and without that
   worker when it falls short again.

What it costs is in results/reference/README.md.
"""
