"""How does a check read: on a terminal, in a job's files, over time, and as the job itself?"""
