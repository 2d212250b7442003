"""Engines behind one protocol: `Sampler` in types.py.

    engine/         the built-in one; the reference for what every other must return
    router/         many replicas as one: sessions placed, moved, failed over, released; weights
                    published to all or served by none
    remote/         vLLM and SGLang, in processes of their own
    simulated       costs without computing, on virtual time

Takes: prompt ids. Gives: ids, the logprobs they were drawn with, and the version that drew them.
"""
