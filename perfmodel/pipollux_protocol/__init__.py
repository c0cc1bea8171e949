"""The protocol between a job and the scheduler: environment, messages, files, exit statuses.

Both sides import these definitions: ``pipollux_hybrid`` in the job's processes, ``pipollux_sched``
in the scheduler and in the agent that runs the job's script. ``python -m
pipollux_protocol.reference`` generates the reference page. For the measurements of a job, see
:mod:`pipollux_perfmodel.hints`.
"""
