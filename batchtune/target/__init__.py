"""Servers to load: launching them, finding them ready, giving them parameters, reading and stopping them.

Out goes `endpoint.Endpoint`; while it serves, `telemetry.ServerActivity`. Start with `choice.target_of`,
`endpoint.external_endpoint`, `telemetry.activity`.
"""
