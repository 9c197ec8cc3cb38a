"""Start a job from one description: on this machine, on several, or through torchx.

`spec` describes a job, with torchrun's argv and environment, `run` runs it on this machine (with
`child` in the processes that it starts), `components` is for torchx, and `__main__` is the command
line.
"""
