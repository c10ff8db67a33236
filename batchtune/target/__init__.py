"""Whom do we ask: how is a server launched, found ready, given parameters, read and stopped?

Out goes `endpoint.Endpoint`; while it serves, `telemetry.ServerActivity`.
Start with `choice.target_of`, `urls.external_endpoint`, `telemetry.activity`.
"""
