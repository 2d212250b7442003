"""Agents' own API dialects in front of a sampler, every turn recorded as ids.

The server needs the extra `gateway`; recording needs nothing, so it is imported from
`treadle.gateway.recorder` and `treadle.gateway.sessions`, the server from
`treadle.gateway.server`.
"""
