"""What a trial was asked, what came of it, and what a run of it takes."""
