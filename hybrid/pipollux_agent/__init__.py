"""Processes on a node around a job's script.

* :mod:`.agent`: torchrun's agent of one replica, with :mod:`.rendezvous` and
  :mod:`.address_exchange`.
* :mod:`.script_main`: runs the script in a child process of the agent.
* :mod:`.supervisor`: the parent of an agent, which survives the scheduler, and the first process of
  a Slurm step.
* :mod:`.as_user`: switches to the job's user.

The last three are run as files, and import only the standard library.
"""
