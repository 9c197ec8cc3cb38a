"""How does a job get from one description to processes, on this machine, several, Slurm, Kubeflow or torchx?

`spec` says what a job is, `command` makes torchrun's argv and environment from it, `runner` runs that on this machine,
`sbatch` and `kubeflow` write it into files, `components` hands it to torchx, `cli` is the command line.

Nothing here imports dist_sparse, and nothing but `child` (in the processes it starts) and `components` imports torch or
torchx. Imports are relative: the folder is `launch` in a clone and `dist_sparse.launch` where the package is installed.
"""
