"""Start a job from one description: on this machine, on several, or through Slurm, Kubeflow or
torchx.

`spec` describes a job, `command` makes torchrun's argv and environment from it, `run` runs it on
this machine (with `child` in the processes that it starts), `sbatch` and `kubeflow` write it into
files, `components` is for torchx, and `cli` is the command line.
"""
