"""The performance model on the command line: fits of measured steps, and predictions from fits.

    arguments, files  command line options, params.json and layers.json as text
    measurements      validated rows of a JSONL file              `pipollux fit`
    fitting           one fit per number of stages
    params_file       params.json, written by `fit` and read by `predict`
    cutting           a cut of the layers per number of stages
    stage_model       a job with one number of stages
    prediction        predictions for allocations                 `pipollux predict`
    plots             plots of fits and predictions

Commands import only the modules that they need.
"""
