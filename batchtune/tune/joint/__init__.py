"""Which parameters suit several models that share a server's batch threads, each with its own SLO?"""
