"""Capture: an unmodified `nn.Module` and example inputs -> a `Program`.

    export     torch.export, non-strict, then the functional form        export.py
    clean      what computes nothing is taken out                       clean.py
    fold       what depends on no parameter and no input is a constant  passes/fold.py
    masks      attention masks recognised by their values               rules/facts.py
    square     weights whose two dims are one factor are told apart     square.py
"""

from plait.capture.steps import capture

__all__ = ["capture"]
