"""Which configuration should be tried next? One strategy a file; each yields asks and is sent trials."""
