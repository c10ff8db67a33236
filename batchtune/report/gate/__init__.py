"""A check as text: on a terminal, in a job's files, over time, and the job itself."""
