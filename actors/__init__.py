"""The gang: the protocol, the runner that turns a step into graph calls, rank actors and the group that steps them."""
