"""Clusters as data: devices, links and levels; presets; what this machine measures."""

from plait.cluster.device import Device
from plait.cluster.presets import detect
from plait.cluster.topology import Cluster, Level, Link
from plait.cluster.transport import Protocol, Transport

__all__ = ["Cluster", "Device", "Level", "Link", "Protocol", "Transport", "detect"]
