"""Processes on a node around a job's script.

* :mod:`.agent`: torchrun's agent of one replica, with :mod:`.rendezvous` and
  :mod:`.address_exchange`.
* :mod:`.servers`: the server for push and pull beside a replica.
* :mod:`.script_main`: runs the script in a child process of the agent.
* :mod:`.supervisor`: the parent of an agent on this machine or in a Slurm step, which survives the
  scheduler.
* :mod:`.as_user`: switches to the job's user.

The last three are run as files, and import only the standard library.
"""
