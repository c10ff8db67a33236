"""The words, threads and limits with which a server is started, and what is kept of its log."""
