"""The performance model by hand: from measured steps to a fit, from a fit to predictions.

    arguments     values of the command line's options
    files         params.json and layers.json as text
    measurements  rows of a JSONL file, each checked          `pipollux fit`
    fitting       one fit for each number of stages
    params_file   params.json, written by one command and read by the other
    cutting       a cut of the layers for each number of stages
    stage_model   a job with one number of stages
    prediction    what a job would do on allocations          `pipollux predict`
    plots         of both

The formulas are those of `pipollux_perfmodel`. Modules are imported one by one: the command line
loads only what a command needs.
"""
