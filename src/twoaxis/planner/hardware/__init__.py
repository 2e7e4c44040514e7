"""Devices: figures with their sources, and the calibration of this machine."""

from twoaxis.planner.hardware.device import Device, Link, device_text, read_device, shipped_devices

__all__ = ["Device", "Link", "device_text", "read_device", "shipped_devices"]
