"""The parts of a compile, in the order in which `api.py` puts them together.

    source.py    the user's model, and how it was asked for          -> Program
    recall.py    a plan that was made before of the same           none is made again
    chosen.py    the mesh, the order of its axes, micro-batches      rank 0's choice, on every rank
    contest.py   overlap against blocking, timed on the ranks         the faster of two programs
    job.py       what runs a program on this rank, and its weights; programs for other forms of call
"""
