"""What is asked: the model, the target, the traffic, the SLO and the space that is searched.

Out goes `spec.scenario.Scenario`, checked; errors name file, line and key. Start with `reader.read_scenario`,
`arrivals.draw`, `payloads.build_requests`.
"""
