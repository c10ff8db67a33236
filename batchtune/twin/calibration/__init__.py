"""Which parameters would have shown what was measured, and how well is a trial left out predicted?"""
