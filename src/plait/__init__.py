"""Plait: a compiler that splits an ordinary PyTorch model over many devices."""
