"""Agents' own API dialects in front of a sampler, every turn recorded as ids.

    server      HTTP; one module per dialect: chat_completions, responses, messages, completions
    wire        requests and answers in our nouns
    refusals    our errors in a client's terms
    sessions    who asks: resends, cancelling, delivery, the end
    history     where a request goes on
    lanes       the sampler's sessions of one session
    replies     ids -> what the client reads
    recorder    the turns of one trajectory as a graph of nodes

The server needs the extra `gateway`; recording needs nothing, so it is imported from
`treadle.gateway.recorder` and `treadle.gateway.sessions`, the server from
`treadle.gateway.server`.
"""
