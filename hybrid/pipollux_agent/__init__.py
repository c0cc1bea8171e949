"""Processes on a node around a job's script.

* :mod:`.agent`: torchrun's agent of one replica, with :mod:`.rendezvous` and
  :mod:`.address_exchange`.
* :mod:`.script_main`: runs the script in a child process of the agent.
* :mod:`.runner`: the parent of the agent on this machine; survives the scheduler.
* :mod:`.step_main`: the first process of a Slurm step.
* :mod:`.as_user`: switches to the job's user.

The last four are run as files, and import only the standard library.
"""
