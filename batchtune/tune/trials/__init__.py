"""What was asked, what came of it, and what does a run of it take?"""
