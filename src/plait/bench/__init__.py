"""Bench: what a split costs and what overlap hides of it, in one command and one process group.

    shapes    a model by its widths, and one rank's share of a larger one
    rows      what is timed: one program in several orchestrations, and with its transfers left out
    textbook  the recipe of every course, written with the overlap pass
    peers     PyTorch's own tensor parallelism, by hand, under torch.compile
    figures   exposed, hidden, speed-up and efficiency of the medians
    report    table, chart, JSON and SVG
    sitting   the command on one rank
"""
