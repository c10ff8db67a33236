"""What is asked: the model, the target, the traffic, the SLO and the space that is searched.

Out goes `spec.scenario.Scenario`, checked, with file, line and key in every complaint.
Start with `reader.read_scenario`, `arrivals.draw`, `payloads.build_requests`.
"""
