"""The performance model by hand: from measured steps to a fit, from a fit to predictions.

    measurements  rows of a JSONL file, each checked          `pipollux fit`
    fitting       one fit for each number of stages
    params_file   params.json, written by one command and read by the other
    layers_file   layers.json, the profile of a model's layers
    cutting       a cut of the layers for each number of stages
    stage_model   a job with one number of stages
    prediction    what a job would do on allocations          `pipollux predict`
    plots         pictures of both

The formulas are those of `pipollux_perfmodel`. Modules are imported one by one, for the command
line loads only what a command needs.
"""
