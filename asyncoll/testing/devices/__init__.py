"""Devices without hardware, and the contract suite of all devices."""

from asyncoll.testing.devices.device_contract import DeviceProgram, check_device
from asyncoll.testing.devices.fake import FakeDevice, Hazard, fake_device

__all__ = ["DeviceProgram", "FakeDevice", "Hazard", "check_device", "fake_device"]
