"""Devices and what computations take on them: figures with their sources, the roofline, and the calibration of a machine."""

from twoaxis.planner.hardware.device import Device, Link, device_text, read_device, shipped_devices

__all__ = ["Device", "Link", "device_text", "read_device", "shipped_devices"]
