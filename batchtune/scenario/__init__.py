"""What is asked: which model, on which target, under which traffic, within which SLO, over which space?

Out goes `spec.scenario.Scenario`, checked, with file, line and key in every complaint.
Start with `reader.read_scenario`, `arrivals.draw`, `payloads.build_requests`.
"""
