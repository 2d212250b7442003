"""Where weights go: checkpoints of a run, the sampler that serves them, files for others.

    checkpoint   any tree of tensors: complete or absent, verified, few
    restore      policy and trainer as a checkpoint and back; a run's policy opened again
    publish      a sampler moved to new weights, and proof that it serves them
    export       PEFT adapter or merged model, with a model card

Import the modules: this one imports nothing, so that a reader of checkpoints needs no models.

Takes: a policy and the state of a run. Gives: complete checkpoints, proven publications, exports.
"""
